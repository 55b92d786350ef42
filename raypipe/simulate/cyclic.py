"""A step that repeats: the task graph of one step, and what the next step waits for of this one."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import Comm, CostTable, delays
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.faults import check_links, check_ran
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, NETWORK, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.run_ahead import tasks_ahead
from raypipe.schedule.versions import unroll
from raypipe.schedule.walk import WalkTimes, walk

Edges = dict[int, list[tuple[int, float]]]
"""Task -> (task that it waits for, time from the end of that one to the earliest start of this one)."""


@dataclass(slots=True)
class CyclicGraph:
    """A step whose tasks start when what they wait for has ended; nothing starts at an absolute time."""

    graph: TaskGraph
    durations: list[float]
    comm: Comm
    carried: Edges
    """What tasks wait for of the step before; the first task of every device and of every network waits for some."""
    also: Edges
    """What tasks wait for of their own step besides the dependency rule."""
    steps: int = 1
    """Training steps that one turn of this graph stands for."""

    def turn(self, end: Mapping[int, float] | Sequence[float] | None) -> WalkTimes:
        """Time one turn that follows one whose tasks ended at ``end``, or the very first one (None).

        Raises:
            ScheduleError: the devices wait for one another in a circle.
        """
        begin = None
        if end is not None:
            begin = {i: max([end[j] + lag for j, lag in waits]) for i, waits in self.carried.items() if waits}
        done = walk(self.graph, self.durations, self.comm, self.also, begin)
        check_ran(self.graph, done)
        return done


@no_collection()
def cyclic(
    schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none"
) -> CyclicGraph:
    """Build the repeating graph of a schedule.

    Synchronous: a device starts its next step when its own order is done, and a stage's next forwards wait for its
    weights: for its update where there is one, else its all-reduce, else the last gradient on every replica.
    Asynchronous: the endless order of ``unroll``; forwards never wait for weights, nor (2BW) updates for the norm.

    Raises:
        ScheduleError: a task waits for one that no device runs; or ``norm`` is not ``none`` and a device has no update
            that could wait (``passes.add_updates``).
    """
    if schedule.versions != "flush":
        return _endless(schedule, costs)
    graph = link(schedule) if graph is None else graph
    check_links(graph)
    lag = max(costs.links, default=0.0)
    also, after = wait_for_norm(graph, norm, lag)
    edges = carried(graph, graph)
    merge(edges, after)
    return CyclicGraph(graph, costs.durations(schedule, graph.tasks), costs.comm, edges, also)


def merge(edges: Edges, more: Edges) -> None:
    """Add the waits of ``more`` to ``edges``."""
    for i, waits in more.items():
        edges.setdefault(i, []).extend(waits)


class _Landmarks:
    """The tasks of a step by which steps hang together; found in one pass."""

    def __init__(self, graph: TaskGraph) -> None:
        self.starts: dict[tuple[int, int], int] = {}
        """(stage, replica) -> its first forward."""
        self.gathers: dict[tuple[int, int], int] = {}
        """(stage, replica) -> its first AG."""
        self.ready: dict[tuple[int, int], tuple[Kind, int]] = {}
        """(stage, replica) -> the task that makes its new weights."""
        network: list[int] = []
        for i, (kind, stage, _, replica) in enumerate(graph.tasks[: graph.first[graph.schedule.devices]]):
            if kind == "F":
                if (stage, replica) not in self.starts:
                    self.starts[stage, replica] = i
            elif kind == "AG":
                self.gathers.setdefault((stage, replica), i)
                network.append(i)
            elif kind in _MAKE_WEIGHTS:
                self.ready[stage, replica] = (kind, i)
                if kind in NETWORK:
                    network.append(i)
        self.lanes: list[tuple[int, int] | None] = []
        """Per device, the first and the last task of its compute, then of its network; None for an empty lane."""
        collectives = set(network)
        for a, b in itertools.pairwise(graph.first):
            compute = next((i for i in range(a, b) if i not in collectives), None)
            last = next((i for i in range(b - 1, a - 1, -1) if i not in collectives), -1)
            own = network[bisect_left(network, a) : bisect_left(network, b)]
            self.lanes += [None if compute is None else (compute, last), (own[0], own[-1]) if own else None]


_MAKE_WEIGHTS = WEIGHT_GRADIENTS | BOOKKEEPING - {"AG", "FREE"}


def carried(graph: TaskGraph, before: TaskGraph) -> Edges:
    """Return the waits of a step's tasks for the step before, which has the same devices.

    A lane's first task waits for the lane's last one. In synchronous schedules the first forward of a stage also waits
    for the stage's weights, and so does its first gather. A collective at the head of an order is issued when the
    device has done the step before.
    """
    own = _Landmarks(graph)
    past = own if before is graph else _Landmarks(before)
    found: Edges = {}
    for lane, done in zip(own.lanes, past.lanes, strict=True):
        if lane is not None and done is not None:
            found[lane[0]] = [(done[1], 0.0)]
    devices = graph.schedule.devices
    for d in range(devices):
        compute, network = past.lanes[2 * d], own.lanes[2 * d + 1]
        if compute is not None and network is not None and network[0] == graph.first[d]:
            found.setdefault(network[0], []).append((compute[1], 0.0))
    if graph.schedule.versions == "flush":
        for (stage, replica), i in (*own.starts.items(), *own.gathers.items()):
            if (stage, replica) in past.ready:
                kind, last = past.ready[stage, replica]
                sources = [last] if kind in BOOKKEEPING else [j for (s, _), (_, j) in past.ready.items() if s == stage]
                found.setdefault(i, []).extend((j, 0.0) for j in sources)
    return found


def wait_for_norm(
    graph: TaskGraph, norm: NormPolicy, lag: float, before: TaskGraph | None = None
) -> tuple[Edges, Edges]:
    """Who waits for the global norm, which is known ``lag`` after the gradients of the last other device are complete.

    Returns:
        The waits of updates for their own step, and those of a step's tasks for ``before`` (default: the same step).

    Raises:
        ScheduleError: a device has no update, or one before its gradients are complete.
    """
    also: Edges = {}
    after: Edges = {}
    if norm == "none":
        return also, after
    devices = range(graph.schedule.devices)
    heads = tasks_ahead(graph.schedule)
    complete = [_gradients_complete(graph if before is None or norm == "wait" else before, d) for d in devices]
    for d in devices:
        first, last = graph.first[d], graph.first[d + 1]
        away = [(i, lag) for e in devices if e != d for i in complete[e]]
        if norm == "optimistic":
            if heads[d] < last - first:
                after[first + heads[d]] = away
            continue
        update = next(i for i in range(first, last) if graph.tasks[i].kind == "U")
        if any(i > update for i in complete[d]):
            raise ScheduleError(
                "schedule",
                f"{graph.tasks[update]} on device {d} comes before the gradients that the norm is made of",
                "add_updates() puts updates at the end",
            )
        also[update] = [*((i, 0.0) for i in complete[d]), *away]
    return also, after


def _gradients_complete(graph: TaskGraph, device: int) -> list[int]:
    """The last compute task and the last collective of a device.

    Raises:
        ScheduleError: the device has no update.
    """
    own = range(graph.first[device], graph.first[device + 1])
    if not any(graph.tasks[i].kind == "U" for i in own):
        raise ScheduleError("schedule", "a device has no update that could wait for the norm", "add_updates() first")
    last: dict[bool, int] = {}
    for i in own:
        if graph.tasks[i].kind != "U":
            last[graph.tasks[i].kind in NETWORK] = i
    return list(last.values())


def _endless(schedule: Schedule, costs: CostTable) -> CyclicGraph:
    """One window of the endless order per device: from a step's first forward to just before the next one's."""
    group = math.ceil(2 * schedule.stages / schedule.microbatches)
    step = unroll(schedule, group)
    count = step.microbatches
    many = unroll(schedule, 3 * group)
    whole = link(many)
    check_links(whole)
    check_ran(whole, walk(whole, costs.durations(many, whole.tasks), costs.comm))
    rows = []
    for order, once in zip(many.orders, step.orders, strict=True):
        begin = next((k for k, t in enumerate(order) if t.kind == "F" and t.mbs[0] // count == 1), 0)
        rows.append(order[begin : begin + len(once)])
    graph = link(many.with_orders(rows))
    edges = carried(graph, graph)
    for i, waits in _missing(graph, count, costs.comm).items():
        edges[i] = [*waits, *edges.get(i, [])]
    return CyclicGraph(graph, costs.durations(many, graph.tasks), costs.comm, edges, {}, group)


def _missing(graph: TaskGraph, count: int, comm: Comm) -> Edges:
    """Return the waits of a window's tasks for the window before, whose micro-batch ids are lower by ``count``."""
    ran = {(t.kind, t.stage, mb): i for i, t in enumerate(graph.tasks) for mb in t.mbs}
    latency = delays(graph.schedule.placement, graph.schedule.graph, comm)
    found: Edges = {}
    for i, (kinds, stage, _), mb in graph.missing:
        task = graph.tasks[i]
        lag = latency[task.replica][task.stage][stage] if latency is not None else 0.0
        source = next(ran[kind, stage, mb + count] for kind in kinds if (kind, stage, mb + count) in ran)
        found.setdefault(i, []).append((source, lag))
    return found
