"""One step taken apart: what every task did, and whose the gap before it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.waits import Pair

HICCUP = 3.0
"""A message that took more than this many times as long as usual on its link found its receiver's host late."""


@dataclass(slots=True)
class StepGaps:
    """One step taken apart; sums of these are the measured starts."""

    work: NDArray[np.float64]
    """Per task, seconds that it ran, without waits inside it; of a collective, its own time on the network."""
    host: NDArray[np.float64]
    data: NDArray[np.float64]
    """Per task, seconds in it that it waited for samples."""
    sums: NDArray[np.float64]
    """Per task, seconds that it could not begin for gradient sums, beyond the collectives of the schedule."""
    norm: NDArray[np.float64]
    """Per task, seconds from the last gradient to its start."""
    begin: dict[int, float]
    """Of the first step: when tasks that wait for the step before could start at the earliest."""
    lags: dict[tuple[int, int], float] = field(default_factory=dict)
    """(task that sends, task that receives) -> seconds of the message's way."""
    late_lags: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same, sent in the step before."""


@dataclass(slots=True)
class Gap:
    """The gap before one task of one step."""

    step: int
    task: int
    ready: float
    """When all that it waited for was over, the way of messages not counted."""
    seconds: float
    waited: tuple[int, Pair, bool] | None
    """The message that was sent last, if that was after its device was free: sender, link, sent in the step before."""
