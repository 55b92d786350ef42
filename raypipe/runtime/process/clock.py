"""Clocks that record when a task ran: the host's clock, or events in the compute stream where kernels run later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.models.host_copies import runs_behind

Mark = float
"""A moment of the current step. Only the clock that made it can interpret it, through ``Clock.end``."""


class Spans(NamedTuple):
    """The times of a step that is issued, though the device may not have come to its end."""

    ready: Callable[[], bool]
    """Returns whether ``times`` would return at once."""
    times: Callable[[], NDArray[np.float64]]
    """Returns the marks as seconds on this host's monotonic clock; waits for the device. Can be called once."""


class Clock(Protocol):
    """Takes marks during a step and turns them into times after its end."""

    def begin(self) -> None:
        """Begin a step, before any of its work is issued. Before the first one it waits for the device."""

    def mark(self) -> Mark:
        """Mark the moment between the work issued so far and the work issued next. Does not block."""

    def end(self, marks: NDArray[np.float64]) -> Spans:
        """End a step of these marks, and forget them. Does not block."""


class HostClock:
    """The clock for devices whose work is done when the call returns."""

    def begin(self) -> None:
        """See Clock.begin."""

    mark = staticmethod(time.monotonic)
    """See Clock.mark."""

    def end(self, marks: NDArray[np.float64]) -> Spans:
        """See Clock.end."""
        return Spans(lambda: True, lambda: marks)


class EventClock:
    """The clock for GPUs: a mark is an event in the compute stream, which shows when kernels ran, not their launch.

    ``make`` returns a timing event of the device (``torch.cuda.Event``). An event is used again once the times of its
    step have been read.

    A step's marks are counted back from its last event. Where the host had to wait for that one, it is now; where the
    device passed it some time ago, it is as long after the last event of the step before as the device says. An event's
    clock has single precision, so distances must be short, and drifts, which a wait or ``now`` itself corrects. All
    times are late by the time the host takes to notice an event, tens of microseconds.
    """

    def __init__(self, make: Callable[[], Any], host: Callable[[], float] = time.monotonic) -> None:
        self._make, self._host = make, host
        self._free: list[Any] = []
        self._taken: list[Any] = []
        self._before: tuple[Any, float] | None = None
        """The last event of the step before, and its time."""

    def begin(self) -> None:
        """See Clock.begin: the first step is to have something before it.

        Later, when messages have come, the device may wait for a peer that never gets there, and the host would too.
        """
        if self._before is None:
            first = self._make()
            first.record()
            first.synchronize()
            self._before = first, self._host()

    def mark(self) -> Mark:
        """See Clock.mark."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._taken.append(event)
        return float(len(self._taken) - 1)

    def end(self, marks: NDArray[np.float64]) -> Spans:
        """See Clock.end."""
        self.mark()
        taken, self._taken = self._taken, []
        indices = marks.astype(np.intp)
        return Spans(taken[-1].query, lambda: np.asarray(self.resolve(taken)[indices]))

    def resolve(self, events: list[Any]) -> NDArray[np.float64]:
        """Return the times of a step's events; waits for the last one. Steps are resolved in order."""
        last = events[-1]
        waited = not last.query()
        last.synchronize()
        at = self._host()
        assert self._before is not None, "there are marks"
        before, then = self._before
        if not waited:
            at = min(at, then + before.elapsed_time(last) * 1e-3)
        self._free.append(before)
        self._before = last, at
        self._free.extend(events[:-1])
        return np.array([at - event.elapsed_time(last) * 1e-3 for event in events])


def timing_event() -> Any:
    """Return an event that records when the current stream of the current GPU comes to it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return EventClock(timing_event) if runs_behind(device) else HostClock()
