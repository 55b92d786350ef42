"""When a task ran: on the host's clock, or, where kernels run behind the host, by events in the device's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Mark = float
"""A moment of the current step; what it means is the clock's business until the step is over."""


class Clock(Protocol):
    """Takes marks during a step and turns them into times at its end."""

    def mark(self) -> Mark:
        """A mark for now: after all work issued so far, before all that follows. Waits for nothing."""

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """The marks of a step as seconds on this host's monotonic clock; then the next step may begin."""


class HostClock:
    """For devices whose work is done when the call returns."""

    def mark(self) -> Mark:
        """See Clock.mark."""
        return time.monotonic()

    def resolve(self, marks: NDArray[np.float64]) -> NDArray[np.float64]:
        """See Clock.resolve."""
        return marks


class EventClock:
    """For GPUs: a mark is an event in the compute stream, so it says when kernels ran, not when they were launched.

    ``make`` gives a timing event of the device (``torch.cuda.Event``).

    The events are tied to the host's clock where the host knows where the stream is: once a step, at its end, after
    a wait for the last of them. Counting back from there keeps every distance short (an event's clock has single
    precision) and lets no drift add up. Against the host's clock all times of a step are
    late by what the host takes to wake, tens of microseconds. Events are used again in every step.
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
    """The clock of a device."""
    if device.type == "cuda":
        return EventClock(partial(torch.cuda.Event, enable_timing=True))
    return HostClock()
