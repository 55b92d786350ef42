"""One Timeline for predicted, emulated and measured steps: spans of tasks per device.

Everything people ask about a step is a function of it: makespan, bubble ratio, live activations, traces, drawings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.schedule.costs import Comm
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BACKWARD, COMPUTE, NETWORK
from raypipe.schedule.live_activations import births, deaths, peak_activations, recomputed_pairs
from raypipe.schedule.walk import dependency_lags


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
    """Per device, by start; only a collective and the halves of a pair may overlap other spans of their device."""
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
        """Per device, most activations alive at once, in units of one stage's; see ``schedule.live_activations``."""
        return peak_activations(self.schedule)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per device, time spent in compute tasks."""
        if self.schedule.joined:
            return tuple(sum(_occupied(s)) for s in self.spans)
        return tuple(sum(x.end - x.start for x in s if x.task.kind in COMPUTE) for s in self.spans)

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / (devices * makespan), busy being compute."""
        total = len(self.spans) * self.makespan
        return 1.0 - sum(self.busy) / total if total else 0.0


def _occupied(spans: tuple[Span, ...]) -> Iterator[float]:
    """Yield the length of each compute span, without what the half of a pair before it covers already."""
    until = 0.0
    for task, start, end in spans:
        if task.kind in COMPUTE:
            yield max(0.0, end - max(start, until))
            until = max(until, end)


def _end(spans: tuple[Span, ...]) -> float:
    return max(s.end for s in spans)  # not the last one's: a collective may outlast later compute


def live_activations(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return, per device, (time, activations alive from then on), in units of one stage's full micro-batch.

    Starts at (0, 0); one entry per moment of change. Its highest value is ``Timeline.peak_activations`` where tasks
    take time.
    """
    schedule = timeline.schedule
    again = recomputed_pairs(schedule)
    size = float(schedule.size)
    rows = []
    for row in timeline.spans:
        changes: list[tuple[float, int]] = []
        for task, start, end in row:
            if born := births(task, again):
                changes.append((start, born))
            if dead := deaths(task, schedule.backwards):
                changes.append((end, -dead))
        curve = [(0.0, 0.0)]
        alive = 0
        for time, change in sorted(changes):  # at equal times the deaths come first
            alive += change
            if curve[-1][0] == time:
                curve[-1] = (time, alive * size)
            else:
                curve.append((time, alive * size))
        rows.append(tuple(curve))
    return tuple(rows)


class CriticalPath(NamedTuple):
    """Tasks from the start of the step to its end, each waiting for the one before."""

    spans: tuple[Span, ...]

    @property
    def forwards(self) -> int:
        """C_f of Chimera's Eq. 1: forwards on the path, recomputed ones not counted."""
        return sum(s.task.kind == "F" for s in self.spans)

    @property
    def backwards(self) -> int:
        """C_b of Chimera's Eq. 1: backwards on the path; a split one counts by its input gradient."""
        return sum(s.task.kind in BACKWARD for s in self.spans)


def critical_path(timeline: Timeline, graph: TaskGraph | None = None) -> CriticalPath:
    """Walk back from the last task to end, each time to what ended last among all the task waited for.

    Of equally late ones a dependency wins over the device's previous task, and one on another device over one here:
    the path then follows micro-batches through the pipeline. Works for measured timelines too, where messages show
    as gaps.

    Source: Li and Hoefler 2021 (Chimera), section 3.4 (C_f and C_b).
    """
    graph = link(timeline.schedule) if graph is None else graph
    number: dict[Task, deque[int]] = {}
    for i, task in enumerate(graph.tasks):  # equal tasks (AG, RS, FREE) of a device run in the order they are in
        number.setdefault(task, deque()).append(i)
    spans: list[Span] = [Span(t, 0.0, 0.0) for t in graph.tasks]
    dependencies = dependency_lags(graph, timeline.comm)
    before: dict[int, int] = {}
    for row in timeline.spans:
        previous = -1
        for span in row:
            i = number[span.task].popleft()
            spans[i] = span
            if span.task.kind not in NETWORK:
                if previous >= 0:
                    before[i] = previous
                previous = i
    if not spans:
        return CriticalPath(())
    i = max(range(len(spans)), key=lambda k: spans[k].end)
    path = [i]
    while True:
        here, halves = graph.device[i], graph.halves(i)
        result = [wait for half in halves for wait in dependencies(half) if wait[0] not in halves]
        waits = [(spans[p].end + lag, 1 + (graph.device[p] != here), p) for p, lag in result]
        if halves[0] in before:
            waits.append((spans[before[halves[0]]].end, 0, before[halves[0]]))
        if not waits:
            break
        i = max(waits)[2]
        path.append(i)
    return CriticalPath(tuple(spans[i] for i in reversed(path)))
