"""One Timeline for predicted, emulated and measured steps: spans of tasks per device.

Everything people ask about a step is a function of it: makespan, bubble ratio, live activations, traces, drawings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.latency import Comm
from raypipe.schedule.live_activations import peak_activations


class Span(NamedTuple):
    """One task on one device, from ``start`` to ``end`` in the timeline's unit (seconds when measured)."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The spans of one step, per device in time order, counted from 0 = the start of the step."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """Per device, by start; only a collective may overlap another span of its device."""
    comm: Comm = 0.0
    """Latency of messages that the spans were made with; 0 when measured (then it shows in the starts)."""

    @property
    def makespan(self) -> float:
        """Time 0 to the end of the last task."""
        return max((_end(s) for s in self.spans if s), default=0.0)

    @property
    def device_spans(self) -> tuple[float, ...]:
        """Per device, last end minus first start."""
        return tuple(_end(s) - s[0].start if s else 0.0 for s in self.spans)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per device, most activations alive at once, in units of one stage's; see ``schedule.memory``."""
        return peak_activations(self.schedule)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, time spent in compute tasks."""
        return tuple(sum(x.end - x.start for x in s if x.task.kind in COMPUTE) for s in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (devices * makespan), busy being compute."""
        total = len(self.spans) * self.makespan
        return 1.0 - sum(self.busy) / total if total else 0.0


def _end(spans: tuple[Span, ...]) -> float:
    return max(s.end for s in spans)  # not the last one's: a collective may outlast later compute
