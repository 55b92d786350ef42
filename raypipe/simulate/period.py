"""Period: the steady time per step when steps follow one another without a global barrier.

The endless run is a linear system over (max, +), and its rate is the largest mean weight of a cycle from a step
to later ones (Baccelli et al. 1992, Synchronization and Linearity, chapter 3). Policy iteration finds it
(Cochet-Terrasson et al. 1998; Dasdan 2004 for keeping what does not improve): a policy says for every carried time
which one of the step before it comes from. Its cycles are real ones, so the rate is no less than the mean of any; it
ends when no other origin would make a time later, so the rate is no more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import Comm, CostTable, delays
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, NETWORK, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.live_activations import unroll
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import tasks_ahead
from raypipe.schedule.sharding import Collective
from raypipe.schedule.sharding import collectives as collectives_of
from raypipe.schedule.verify import check_links, check_ran
from raypipe.schedule.walk import WalkTimes, dependency_lags, walk
from raypipe.simulate.engine import simulate


class Steady(NamedTuple):
    """A step that repeats for ever."""

    rate: float
    """Time from one step to the next."""
    starts: tuple[float, ...]
    """Per device, when it may begin the step, on one clock for all; of a synchronous schedule, else empty. With these
    starts every device ends within ``rate`` of its own."""


def period(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none") -> float:
    """Steady time per step, in the cost table's unit.

    A device begins its next step as soon as its own order is done; a stage's next forward waits for its weights (see
    ``cyclic``). Zero-bubble methods improve this, not the makespan. ``norm`` says what updates have to do with the
    global gradient norm; with ``wait`` every synchronous step takes its makespan.

    Raises:
        ScheduleError: the schedule cannot run; or ``norm`` for one without updates.
    """
    return steady(schedule, costs, graph, norm).rate


def steady(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none") -> Steady:
    """The period, and where in it the devices begin.

    Raises:
        ScheduleError: as ``period``.
    """
    if schedule.versions == "flush" and graph is None:
        graph = link(schedule)
    turn = cyclic(schedule, costs, graph, norm)
    rate, state = _rate(turn)
    starts: tuple[float, ...] = ()
    if schedule.versions == "flush" and graph is not None:
        ends = [state.get(b - 1, 0.0) if b > a else 0.0 for a, b in itertools.pairwise(graph.first)]
        least = min(ends, default=0.0)
        starts = tuple(end - least for end in ends)
    return Steady(rate / turn.steps, starts)


def _rate(cycle: CyclicGraph) -> tuple[float, dict[int, float]]:
    """Time of one turn, and of each carried time where it can be when every turn takes that long."""
    sources = sorted({j for waits in cycle.carried.values() for j, _ in waits})
    state = dict.fromkeys(sources, 0.0)
    origin: dict[int, int] = {}
    weight: dict[int, float] = {}
    rate = 0.0
    slack = 1e-12 * max(1.0, sum(cycle.durations))
    for _ in range(8 * len(sources) + 50):  # far more than were ever seen to be needed
        done = cycle.turn(state)
        after = done.end
        better = [j for j in sources if j not in origin or after[j] - rate > state[j] + slack]
        if not better:
            break
        origins = _Origins(cycle, done, state)
        for j in better:  # only these: where others tie, a changing mind can go round a longer cycle for ever
            origin[j] = origins.of(j)
            weight[j] = after[j] - state[origin[j]]
        mean, circle = _best_cycle(origin, weight)
        rate = max(rate, mean)
        if all(after[j] - rate <= state[j] + slack for j in better):
            break
        for j in better:
            state[j] = max(state[j], after[j] - rate)
        _follow(origin, weight, rate, circle, state)
    return rate, state


class _Origins:
    """Which time of the step before decided when a task ends: the origin of the longest path to it."""

    def __init__(self, cycle: CyclicGraph, done: WalkTimes, state: dict[int, float]) -> None:
        self.cycle, self.tasks, self.done, self.state = cycle, cycle.graph.tasks, done, state
        self.dependencies = dependency_lags(cycle.graph, cycle.comm)
        self.known: dict[int, int] = {}
        self.first = set(cycle.graph.first)

    @cached_property
    def part_of(self) -> dict[int, Collective]:
        """Network task -> the collective that it is part of."""
        return collectives_of(self.cycle.graph)

    @cached_property
    def collectives(self) -> dict[Collective, list[int]]:
        """The tasks of each collective."""
        result: dict[Collective, list[int]] = {}
        for i, one in self.part_of.items():
            result.setdefault(one, []).append(i)
        return result

    def of(self, task: int) -> int:
        """A task of the step before."""
        path = [task]
        while path[-1] not in self.known:
            before, previous = self._latest(path[-1])
            if before is not None:
                self.known[path[-1]] = before
            else:
                path.append(previous)
        result = self.known[path[-1]]
        self.known.update(dict.fromkeys(path, result))
        return result

    def _latest(self, i: int) -> tuple[int | None, int]:
        """Return what ``i`` waited for longest: a task of the step before, else (None, a task of this step).

        Of equally late ones: a dependency without a message, then the task before it on its lane.
        """
        at, end = self.done.start[i], self.done.end
        if self.tasks[i].kind in NETWORK:
            return self._latest_of_group(self.collectives[self.part_of[i]], at)
        halves = self.cycle.graph.halves(i)
        also = [wait for half in halves for wait in self.cycle.also.get(half, ())]
        dependencies = [wait for half in halves for wait in self.dependencies(half)]
        for p, lag in dependencies:
            if end[p] == at and not lag:
                return None, p
        previous = self._previous(halves[0], False)
        if previous is not None and end[previous] == at:
            return None, previous
        for p, lag in (*(wait for wait in also if not wait[1]), *dependencies, *also):
            if end[p] + lag == at:
                return None, p
        carried = (wait for half in halves for wait in self.cycle.carried.get(half, ()))
        return next(j for j, lag in carried if self.state[j] + lag == at), i

    def _latest_of_group(self, group: list[int], at: float) -> tuple[int | None, int]:
        """The same of an all-reduce: every holder waits for whatever one of them waits for."""
        waits = {p for i in group for p, _ in self.dependencies(i)}
        lanes = [self._previous(i, network) for i in group for network in (False, True)]  # issued after compute
        waits.update(p for p in lanes if p is not None)
        for p in sorted(waits.difference(group)):
            if self.done.end[p] == at:
                return None, p
        before = sorted(wait for i in group for wait in self.cycle.carried.get(i, ()))
        return next(j for j, lag in before if self.state[j] + lag == at), group[0]

    def _previous(self, i: int, network: bool) -> int | None:
        """The task before ``i`` on its device's network or compute lane."""
        while i not in self.first:
            i -= 1
            if (self.tasks[i].kind in NETWORK) == network:
                return i
        return None


def gains_ahead(schedule: Schedule, costs: CostTable) -> bool:
    """Return whether steps follow one another faster if devices run ahead of the gradient norm than if they wait.

    ``schedule`` with its updates. False for PipeDream, whose updates know no global norm. The latency of the norm
    itself, which every schedule could hide, is left out: it does not pay for the copies that running ahead takes.
    """
    if schedule.versions != "flush":
        return schedule.versions == "2bw"
    graph = link(schedule)
    return period(schedule, costs, graph, "optimistic") < simulate(schedule, costs, graph).makespan * (1 - 1e-9)


def _best_cycle(origin: dict[int, int], weight: dict[int, float]) -> tuple[float, list[int]]:
    """The largest mean weight of a cycle of the policy, and that cycle."""
    best: tuple[float, list[int]] = float("-inf"), []
    seen = set[int]()
    for begin in origin:
        path: dict[int, int] = {}
        j = begin
        while j not in seen:
            seen.add(j)
            path[j] = len(path)
            j = origin[j]
        if j in path:
            circle = [k for k, n in path.items() if n >= path[j]]
            best = max(best, (sum(weight[k] for k in circle) / len(circle), circle))
    return best


def _follow(
    origin: dict[int, int], weight: dict[int, float], rate: float, circle: list[int], state: dict[int, float]
) -> None:
    """Set the times that lead back to ``circle`` to what the policy gives: each edge adds its weight minus the rate.

    One time on the circle is held fixed; times that lead elsewhere stay what they are.
    """
    leads: dict[int, list[int]] = {}
    for j, source in origin.items():
        leads.setdefault(source, []).append(j)
    fixed = circle[0]
    done = {fixed}
    todo = [fixed]
    for source in todo:
        for j in leads.get(source, ()):
            if j not in done:
                done.add(j)
                state[j] = weight[j] + state[source] - rate
                todo.append(j)


# A step that repeats: the task graph of one step, and what the next step waits for of this one.


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
    result: Edges = {}
    for lane, done in zip(own.lanes, past.lanes, strict=True):
        if lane is not None and done is not None:
            result[lane[0]] = [(done[1], 0.0)]
    devices = graph.schedule.devices
    for d in range(devices):
        compute, network = past.lanes[2 * d], own.lanes[2 * d + 1]
        if compute is not None and network is not None and network[0] == graph.first[d]:
            result.setdefault(network[0], []).append((compute[1], 0.0))
    if graph.schedule.versions == "flush":
        for (stage, replica), i in (*own.starts.items(), *own.gathers.items()):
            if (stage, replica) in past.ready:
                kind, last = past.ready[stage, replica]
                sources = [last] if kind in BOOKKEEPING else [j for (s, _), (_, j) in past.ready.items() if s == stage]
                result.setdefault(i, []).extend((j, 0.0) for j in sources)
    return result


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
            for i in range(first + heads[d], last):  # the device stops there, and so does what it issues to networks
                after[i] = away
                if graph.tasks[i].kind not in NETWORK:
                    break
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
    result: Edges = {}
    for i, (kinds, stage, _), mb in graph.missing:
        task = graph.tasks[i]
        lag = latency[task.replica][task.stage][stage] if latency is not None else 0.0
        source = next(ran[kind, stage, mb + count] for kind in kinds if (kind, stage, mb + count) in ran)
        result.setdefault(i, []).append((source, lag))
    return result
