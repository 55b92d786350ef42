"""A step that repeats: the task graph of one step, and the edges by which the next step waits for this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.faults import check_links, check_ran
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BOOKKEEPING, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.latency import Comm, delays
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.run_ahead import tasks_ahead
from raypipe.schedule.unroll import unroll
from raypipe.schedule.walk import walk


@dataclass(slots=True)
class CyclicGraph:
    """Every task's start is the latest of what it waits for; nothing starts at an absolute time."""

    order: list[int]
    """Tasks, each after all those of its own step that it waits for."""
    durations: list[float]
    local: list[Sequence[int]]
    """Tasks of the same step that must have ended."""
    remote: list[Sequence[tuple[int, float]]]
    """The same where a message lies between, and its latency."""
    carried: dict[int, list[tuple[int, float]]]
    """Task -> (task of the step before, lag) it waits for."""
    steps: int = 1
    """Training steps that one turn of this graph stands for."""


@no_collection()
def cyclic(
    schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none"
) -> CyclicGraph:
    """Build the repeating graph of a schedule.

    Synchronous: a device starts its next step when its own order is done, and a stage's next forwards wait for its
    weights: for its update where there is one, else its all-reduce, else the last gradient on every replica.
    Asynchronous: the endless order of ``unroll``; forwards never wait for weights, nor (2BW) updates for the norm.
    Where updates are optimistic, the next step's first task that is no forward waits for the norm instead.

    Raises:
        ScheduleError: the schedule cannot run; or ``norm`` where devices have no updates (``passes.add_updates``).
    """
    if schedule.versions == "flush":
        graph = link(schedule) if graph is None else graph
        turn = _flushed(schedule, costs, graph)
        if norm != "none":
            _await_norm(turn, graph, norm, max(costs.links, default=0.0))
        return turn
    return _endless(schedule, costs)


def _await_norm(turn: CyclicGraph, graph: TaskGraph, norm: NormPolicy, lag: float) -> None:
    """Add the waits for the global norm, known ``lag`` after the last device's gradients are complete."""
    schedule, devices = graph.schedule, range(graph.schedule.devices)
    complete: list[list[int]] = []  # per device, the last tasks that its gradients wait for
    updates: list[list[int]] = []
    for d in devices:
        own = range(graph.first[d], graph.first[d + 1])
        last: dict[bool, int] = {}
        for i in own:
            if graph.tasks[i].kind != "U":
                last[graph.tasks[i].kind == "AR"] = i
        complete.append(list(last.values()))
        updates.append([i for i in own if graph.tasks[i].kind == "U"])
    if not all(updates):
        raise ScheduleError("schedule", "a device has no update that could wait for the norm", "add_updates() first")
    heads = tasks_ahead(schedule)
    for d in devices:
        away = [(i, lag) for e in devices if e != d for i in complete[e]]
        if norm == "wait":
            first = updates[d][0]
            turn.local[first] = [*turn.local[first], *complete[d]]
            turn.remote[first] = [*turn.remote[first], *away]
        else:
            waiting = graph.first[d] + heads[d]
            turn.carried[waiting] = [*turn.carried.get(waiting, []), *away]
    late = {i for row in updates for i in row}
    turn.order[:] = [i for i in turn.order if i not in late] + sorted(late)


def _flushed(schedule: Schedule, costs: CostTable, graph: TaskGraph) -> CyclicGraph:
    check_links(graph)
    tasks, first = graph.tasks, graph.first
    durations = costs.durations(schedule, tasks)
    done = walk(graph, durations, costs.comm)
    check_ran(graph, done)
    local, remote = _split(graph, costs.comm)
    carried: dict[int, list[tuple[int, float]]] = {}
    ready: dict[tuple[int, int], tuple[Kind, int]] = {}
    starts: dict[tuple[int, int], int] = {}
    collectives: dict[int, list[int]] = {}
    for d in range(schedule.devices):
        lanes: dict[bool, list[int]] = {False: [], True: []}
        for i in range(first[d], first[d + 1]):
            kind, stage, _, replica = tasks[i]
            lane = lanes[kind == "AR"]
            waits = [lane[-1]] if lane else []
            if kind == "AR":
                collectives.setdefault(stage, []).append(i)
                waits += lanes[False][-1:]
                local[i] = [*local[i], *waits]
            elif waits:
                local[i] = [*local[i], waits[0]]
            lane.append(i)
            if kind == "F":
                starts.setdefault((stage, replica), i)
            elif kind in WEIGHT_GRADIENTS or kind in BOOKKEEPING:
                ready[stage, replica] = (kind, i)
        for lane in lanes.values():
            if lane:
                carried[lane[0]] = [(lane[-1], 0.0)]
    for group in collectives.values():  # all holders start together, so each waits for what any of them waits for
        everything = sorted({p for i in group for p in local[i]}.difference(group))
        before = sorted({wait for i in group for wait in carried.get(i, [])})
        for i in group:
            local[i] = everything
            if before:
                carried[i] = before
    for (stage, replica), i in starts.items():
        kind, own = ready[stage, replica]
        sources = [own] if kind in BOOKKEEPING else [j for (s, _), (_, j) in ready.items() if s == stage]
        carried.setdefault(i, []).extend((j, 0.0) for j in sources)
    return CyclicGraph(done.order, durations, local, remote, carried)


def _endless(schedule: Schedule, costs: CostTable) -> CyclicGraph:
    """One window of the endless order per device: from a step's first forward to just before the next one's."""
    group = math.ceil(2 * schedule.stages / schedule.microbatches)
    step = unroll(schedule, group)
    count = step.microbatches
    many = unroll(schedule, 3 * group)
    graph = link(many)
    check_links(graph)
    durations = costs.durations(many, graph.tasks)
    done = walk(graph, durations, costs.comm)
    check_ran(graph, done)
    window: list[int] = []
    edge: list[tuple[int, int]] = []
    for d in range(many.devices):
        length = len(step.orders[d])
        order = many.orders[d]
        begin = graph.first[d] + next((k for k, t in enumerate(order) if t.kind == "F" and t.mbs[0] // count == 1), 0)
        if length:
            window += range(begin, begin + length)
            edge.append((begin, begin + length - 1))
    inside = set(window)
    name = _namer(many, count)
    twin = {name(graph.tasks[i]): i for i in window}  # a task outside the window is one inside, a turn earlier
    local, remote = _split(graph, costs.comm)
    carried: dict[int, list[tuple[int, float]]] = {}
    before = {b: b - 1 for begin, end in edge for b in range(begin + 1, end + 1)}
    for i in window:
        waits = [(p, 0.0) for p in local[i]] + list(remote[i])
        for p, lag in waits:
            if p not in inside:
                carried.setdefault(i, []).append((twin[name(graph.tasks[p])], lag))
        local[i] = [p for p in local[i] if p in inside] + ([before[i]] if i in before else [])
        remote[i] = [(p, lag) for p, lag in remote[i] if p in inside]
    for begin, end in edge:
        carried.setdefault(begin, []).append((end, 0.0))
    return CyclicGraph([i for i in done.order if i in inside], durations, local, remote, carried, group)


def _namer(schedule: Schedule, count: int) -> Callable[[Task], Task]:
    return lambda task: task._replace(mbs=tuple(m % count for m in task.mbs))


def _split(graph: TaskGraph, comm: Comm) -> tuple[list[Sequence[int]], list[Sequence[tuple[int, float]]]]:
    """Predecessors without and with a delay; without latency there is no need to tell them apart."""
    latency = delays(graph.schedule.placement, graph.schedule.graph, comm)
    if latency is None:
        return list(graph.preds), [()] * len(graph.preds)
    tasks = graph.tasks
    local: list[Sequence[int]] = []
    remote: list[Sequence[tuple[int, float]]] = []
    for (_, stage, _, replica), needs in zip(tasks, graph.preds, strict=True):
        wait = latency[replica][stage]
        near: list[int] = []
        far: list[tuple[int, float]] = []
        for p in needs:
            lag = wait[tasks[p][1]]
            if lag:
                far.append((p, lag))
            else:
                near.append(p)
        local.append(near)
        remote.append(far)
    return local, remote
