"""The critical path of a Timeline: the chain of tasks that decides its end."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import BACKWARD, NETWORK
from raypipe.schedule.walk import dependency_lags
from raypipe.simulate.timeline import Span, Timeline


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
        here = graph.device[i]
        waits = [(spans[p].end + lag, 1 + (graph.device[p] != here), p) for p, lag in dependencies(i)]
        if i in before:
            waits.append((spans[before[i]].end, 0, before[i]))
        if not waits:
            break
        i = max(waits)[2]
        path.append(i)
    return CriticalPath(tuple(spans[i] for i in reversed(path)))
