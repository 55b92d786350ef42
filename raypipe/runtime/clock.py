"""Clocks that record when a task ran: the host's clock, or events in the compute stream where kernels run later."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Mark = float
"""A moment of the current step. Only the clock that made it can interpret it, through ``Clock.resolve``."""


class Clock(Protocol):
    """Takes marks during a step and turns them into times at its end."""

    def mark(self) -> Mark:
        """Mark the moment between the work issued so far and the work issued next. Does not block."""

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """Convert the marks of a step to seconds on this host's monotonic clock, and forget them."""


class HostClock:
    """The clock for devices whose work is done when the call returns."""

    def mark(self) -> Mark:
        """See Clock.mark."""
        return time.monotonic()

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """See Clock.resolve."""
        return marks


class EventClock:
    """The clock for GPUs: a mark is an event in the compute stream, which shows when kernels ran, not their launch.

    ``make`` returns a timing event of the device (``torch.cuda.Event``). Events are reused in every step.

    ``resolve`` waits for the last event, reads the host's clock, and counts all other events back from there. Doing so
    once a step keeps the distances short (an event's clock has single precision) and does not accumulate drift. All
    times of a step are late by the time the host takes to wake up, tens of microseconds.
    """

    def __init__(self, make: Callable[[], Any], host: Callable[[], float] = time.monotonic) -> None:
        self._make, self._host = make, host
        self._events: list[Any] = []
        self._taken = 0

    def mark(self) -> Mark:
        """See Clock.mark."""
        if self._taken == len(self._events):
            self._events.append(self._make())
        self._events[self._taken].record()
        self._taken += 1
        return float(self._taken - 1)

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """See Clock.resolve. Waits for the device."""
        last = self._events[int(self.mark())]
        last.synchronize()
        now = self._host()
        taken = self._events[: self._taken]
        self._taken = 0
        times = np.array([now - event.elapsed_time(last) * 1e-3 for event in taken])
        return np.asarray(times[marks.astype(np.intp)])


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    if device.type == "cuda":
        return EventClock(partial(torch.cuda.Event, enable_timing=True))
    return HostClock()
