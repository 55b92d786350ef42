"""A step that was started, and whose result the host reads later: on a GPU, while the next step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raypipe.runtime.clocks.clock import Spans
from raypipe.runtime.executor.step import StepResult


@dataclass(frozen=True, slots=True)
class StartedStep:
    """What is known of a step when its last task has been queued."""

    partial: StepResult
    """The result, as far as the host knows it."""
    loss: Tensor | None
    """Sum of the losses, on its way to the host (``host_copies.to_host``); None without a last stage here."""
    targets: int
    """Targets of the mini-batch."""
    squares: Tensor | None
    """Squared gradient norms of the step's updates, on their way to the host; None without updates."""
    spans: Spans
    times_of: Callable[[Spans], NDArray[np.float64]]
    """Waits for the step's end."""
    late: Callable[[NDArray[np.float64]], float] | None = None
    """Where updates are made while the next step runs: completes them, sets when all-reduces ended, and returns this
    device's share of the squared norm."""

    def result(self) -> StepResult:
        """Wait for the end of the step on the device, and return its result. Call it once, in the order of steps.

        Raises:
            TransportError: the device, or one of its messages, does not get there in time.
        """
        times = self.times_of(self.spans)
        loss = 0.0 if self.loss is None else float(self.loss) / self.targets
        # With several updates in a step (PipeDream), report the mean of their squared norms.
        squares = [] if self.squares is None else self.squares.tolist()
        norm = sum(squares) / max(1, len(squares)) if self.late is None else self.late(times)
        return replace(self.partial, times=times, loss_sum=loss, norm_squared=norm)
