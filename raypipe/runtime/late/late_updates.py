"""Updates that are made while the next step already runs: what the executor asks of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raypipe.runtime.stage.stage import MicrobatchState
from raypipe.runtime.update.gradients import StageKey
from raypipe.schedule.lowering.programs import Program


class LateUpdates(Protocol):
    """Makes the updates of one device's stage replicas without a barrier between steps."""

    def begin_step(self, program: Program, step: int, lr: float) -> None:
        """A training step begins."""

    def before_forward(self, key: StageKey) -> None:
        """The forward of a stage replica is to run next; what it reads must be updated by then."""

    def before_backward(self, key: StageKey) -> None:
        """A backward of a stage replica is to run next, and may add to gradients."""

    def takes(self, key: StageKey, saved: MicrobatchState) -> bool:
        """Take over the deferred weight gradients of a micro-batch; returns False to leave them to the caller."""

    def begin(self) -> None:
        """All sums of this device's step have been started."""

    def defer(self, key: StageKey, step: int, lr: float) -> None:
        """The step's gradients of a stage replica are complete, or will be; ``lr`` is that of its update."""

    def complete(self, key: StageKey) -> None:
        """Make what is left of a stage replica's update; does nothing if nothing is."""

    def complete_all(self) -> None:
        """Make what is left of all updates."""

    def report(self, step: int, program: Program, times: NDArray[np.float64]) -> float:
        """Return this device's share of a step's squared gradient norm; its updates are completed for that."""

    def close(self) -> None:
        """Give up what is left of the updates, and everything that this refers to."""
