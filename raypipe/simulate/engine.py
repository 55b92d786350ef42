"""The simulator: a schedule and a cost table in, a Timeline out."""

from __future__ import annotations

import itertools

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.verify import check_links, check_ran
from raypipe.schedule.walk import walk
from raypipe.simulate.timeline import Span, Timeline


@no_collection()
def simulate(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None) -> Timeline:
    """Time every task, each as early as its device's order and its dependencies allow.

    A dependency inside one device costs nothing, one across devices the latency of its link. Collectives (AG,
    RS, AR) run on a network lane of their own and overlap later compute; updates occupy the device.

    Args:
        schedule: what to time.
        costs: time of each task; the timeline is in its unit.
        graph: ``link(schedule)``, where the caller has it already.

    Raises:
        ScheduleError: a task is doubled, waits for one that no device runs, or waits in a circle of devices; the
            message holds the device grid with the first impossible task marked. Or: costs for another number of
            stages.
    """
    graph = link(schedule) if graph is None else graph
    durations = costs.durations(schedule, graph.tasks)
    check_links(graph)
    done = walk(graph, durations, costs.comm)
    check_ran(graph, done)
    spans = []
    for d in range(schedule.devices):
        own = slice(graph.first[d], graph.first[d + 1])
        row = list(map(Span, graph.tasks[own], done.start[own], done.end[own]))
        if any(a.start > b.start for a, b in itertools.pairwise(row)):  # a collective that ran beside compute
            row.sort(key=lambda span: span.start)
        spans.append(tuple(row))
    return Timeline(schedule, tuple(spans), costs.comm)
