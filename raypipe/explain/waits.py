"""Waits of the tasks of a measured step, before any time is known."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from raypipe.explain.measured import Measured
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.sharding.collectives import Collective, collectives
from raypipe.simulate.cyclic import Edges, carried, merge, wait_for_norm
from raypipe.simulate.series import all_reduces_before_updates

Pair = tuple[int, int]
"""(device that sends, device that receives)."""


@dataclass(slots=True)
class Waits:
    """Waits of the tasks of a step, before any time is known."""

    graph: TaskGraph
    messages: list[list[tuple[int, Pair]]]
    """Per task, (task of another device, the link) whose message it needs."""
    late_messages: list[list[tuple[int, Pair]]]
    """The same of the step before, in schedules without a flush."""
    before: list[int]
    """Per compute task, the one before it on its device; -1 for the first, and for collectives."""
    last: list[int]
    """Per device, its last compute task; -1 for none."""
    own: Edges
    """Further waits for tasks of the same step: of updates for all gradient sums of their device."""
    carried: Edges
    """Waits for tasks of the step before."""
    norm: Edges
    """Waits of updates for the gradients of all devices, which the norm is made of."""
    norm_after: Edges
    """The same of tasks that wait for the norm of the step before."""
    collective: dict[int, Collective]


def waits_of(of: Measured, graph: TaskGraph) -> Waits:
    """Resolve what the tasks of a step wait for.

    Raises:
        ScheduleError: updates are to wait for the norm, and a device has none.
    """
    device, count = graph.device, of.schedule.microbatches
    messages: list[list[tuple[int, Pair]]] = [[] for _ in graph.tasks]
    late: list[list[tuple[int, Pair]]] = [[] for _ in graph.tasks]
    for i, preds in enumerate(graph.preds):
        if graph.tasks[i].mbs:
            messages[i] = [(p, (device[p], device[i])) for p in preds if device[p] != device[i]]
    ran = {(t.kind, t.stage, mb): i for i, t in enumerate(graph.tasks) for mb in t.mbs} if graph.missing else {}
    for i, (kinds, stage, _), mb in graph.missing:
        source = next((ran[k, stage, mb + count] for k in kinds if (k, stage, mb + count) in ran), None)
        if source is not None and device[source] != device[i]:  # else the order of its device says so
            late[i].append((source, (device[source], device[i])))
    before, last = [-1] * len(graph.tasks), [-1] * of.schedule.devices
    for d, (first, end) in enumerate(itertools.pairwise(graph.first)):
        for i in range(first, end):
            if graph.tasks[i].kind not in NETWORK:
                before[i], last[d] = last[d], i
    norm, after = wait_for_norm(graph, of.norm, 0.0)
    return Waits(
        graph,
        messages,
        late,
        before,
        last,
        all_reduces_before_updates(graph),
        carried(graph, graph),
        norm,
        after,
        collectives(graph),
    )


def merged(*edges: Edges) -> Edges:
    """All waits of several tables, in a new one."""
    found: Edges = {}
    for one in edges:
        merge(found, {i: list(waits) for i, waits in one.items()})
    return found
