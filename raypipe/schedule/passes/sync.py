"""Where the replicas of a stage all-reduce their gradients, and where weights are updated."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast, get_args

from raypipe.errors import ScheduleError, check_known
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.verify import check_links, check_ran
from raypipe.schedule.walk import start_together, walk

Sync = Literal["lazy", "eager", "eager-opt"]
"""Where a schedule has its all-reduces."""
BY_LAYER = ("prioritised", "reverse-first-k")
"""Ways to synchronise without a barrier: each layer is updated when its sum is in, before the next step reads it."""
BY_BUCKET = ("wait-free", *BY_LAYER)
"""Ways to synchronise that go by buckets of gradients, inside of tasks; their all-reduces are placed as ``eager``."""


def placement_of(sync: str) -> Sync:
    """Return where the all-reduces of a job's ``parallel.sync`` are placed.

    >>> placement_of("lazy"), placement_of("wait-free")
    ('lazy', 'eager')
    """
    return "eager" if sync in BY_BUCKET else cast(Sync, sync)


def held(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Per device, the (stage, replica) pairs it holds, by stage."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(schedule.devices)]
    for replica, placement in enumerate(schedule.placement):
        for stage, device in enumerate(placement):
            rows[device].append((stage, replica))
    return [sorted(row) for row in rows]


def place_gradient_sync(
    schedule: Schedule, policy: Sync, costs: CostTable | None = None, copies: int = 1, graph: TaskGraph | None = None
) -> Schedule:
    """Insert one AR per held stage replica, for stages that more than one replica holds.

    Where gradients are reduce-scattered, AR sums the shards over the groups that replicate them, and follows RS; a
    stage whose shard group is all its holders needs none. It also comes after every other collective that starts before
    all holders are ready: on the same network, a gather behind it would wait for devices that may wait for the gather.

    Args:
        schedule: a schedule without AR tasks; existing ones are placed anew.
        policy: ``lazy`` after all local compute; ``eager`` right after the stage's last local gradient;
            ``eager-opt`` eagerly only where the device idles between that gradient and the end of its compute, so that
            middle stages, which have no bubble to hide in, do not slow down the compute beside them.
        costs: decides where devices idle and which stage is ready first; default F = B = W = 1.
        copies: data-parallel copies that take part, of which ``schedule`` is one; what holds for it holds for all.
        graph: ``link(schedule)``, where the caller has it already and ``schedule`` has no AR.

    Every device issues its all-reduces in one global order, the order in which stages get ready: collectives issued
    in different orders on two devices would wait for each other for ever.

    Raises:
        ScheduleError: unknown policy, or a schedule that cannot run.

    Source: Li and Hoefler 2021 (Chimera), section 3.2.
    """
    check_known(ScheduleError, "sync", policy, get_args(Sync))
    bare = schedule.without({"AR"})
    sums = stages_to_sum(bare, copies)
    if not sums:
        return bare
    costs = CostTable.even(bare.stages) if costs is None else costs
    graph = link(bare) if graph is None else graph
    check_links(graph)
    durations = costs.durations(bare, graph.tasks)
    done = walk(graph, durations, costs.comm)
    check_ran(graph, done)

    last = last_gradients(graph)
    ready = times_ready(graph, last, done.end)
    order_of_sums = [stage for stage in _by_time(ready) if stage in sums]
    turn = {stage: n for n, stage in enumerate(order_of_sums)}
    rows = held(bare)
    closes = [max((k + 1 for k, t in enumerate(order) if t.kind != "U"), default=0) for order in bare.orders]
    lazy: set[tuple[int, int]] = set()
    for d, pairs in enumerate(rows):
        first, until = graph.first[d], graph.first[d] + closes[d]
        for pair in pairs:
            if policy == "lazy" or (
                policy == "eager-opt" and not _idles(done.start, done.end, last.get(pair, first), until - 1)
            ):
                lazy.add(pair)
                ready[pair[0]] = max(ready[pair[0]], max(done.end[first:until], default=0.0))
    for before, stage in itertools.pairwise(order_of_sums):
        ready[stage] = max(ready[stage], ready[before])

    orders: list[list[Task]] = []
    for d, pairs in enumerate(rows):
        first, order = graph.first[d], list(bare.orders[d])
        others = [k for k, t in enumerate(order) if t.kind in NETWORK]
        after: dict[int, list[Task]] = {}
        at = 0
        for stage, replica in sorted((p for p in pairs if p[0] in turn), key=lambda p: (turn[p[0]], p)):
            behind = bisect_right(others, ready[stage], key=lambda k: done.start[first + k])
            own = last.get((stage, replica), first - 1) - first + 1
            at = max(at, closes[d] if (stage, replica) in lazy else own, others[behind - 1] + 1 if behind else 0)
            after.setdefault(at, []).append(Task("AR", stage, (), replica))
        new = list(after.get(0, []))
        for k, task in enumerate(order):
            new += [task, *after.get(k + 1, [])]
        orders.append(new)
    return bare.with_orders(orders)


def stages_to_sum(schedule: Schedule, copies: int = 1) -> set[int]:
    """Return the stages that have an AR: several replicas hold them, and RS does not sum over all of these.

    Args:
        schedule: with or without AR tasks.
        copies: data-parallel copies that take part, of which ``schedule`` is one.
    """
    several = schedule.replicas * copies > 1
    return {stage for stage in range(schedule.stages) if several and not _scattered_over_all(schedule, stage, copies)}


def _scattered_over_all(schedule: Schedule, stage: int, copies: int) -> bool:
    """Return whether the stage's RS sums over all its holders, ``copies`` times those of the schedule.

    So it is, too, with nothing to sum: a frozen stage beside sharded ones, which have no running statistics.
    """
    sharding = schedule.sharding
    if sharding is None:
        return False
    if not schedule.backwards[stage].weight_grad:
        return True
    if not sharding.levels[stage]:
        return False
    everyone = sharding.group is None or sharding.group == sharding.copies * copies
    return everyone and schedule.replicas == sharding.copies


def last_gradients(graph: TaskGraph) -> dict[tuple[int, int], int]:
    """(stage, replica) -> number of the task that completes its gradients; none for one without a micro-batch.

    Of a frozen stage it is its last task: its holders may have statistics to sum.
    """
    complete = [backward.last | {"RS"} for backward in graph.schedule.backwards]
    return {(t.stage, t.replica): i for i, t in enumerate(graph.tasks) if t.kind in complete[t.stage]}


def sync_order(graph: TaskGraph, last: dict[tuple[int, int], int], end: Sequence[float]) -> list[int]:
    """Stages in the global order of their all-reduces: as they get ready.

    Args:
        graph: without all-reduces.
        last: ``last_gradients(graph)``.
        end: of each task.
    """
    return _by_time(times_ready(graph, last, end))


def times_ready(graph: TaskGraph, last: dict[tuple[int, int], int], end: Sequence[float]) -> list[float]:
    """Per stage, when all its holders have its gradients; arguments as of ``sync_order``."""
    ready = [0.0] * graph.schedule.stages
    for (stage, _), i in last.items():
        ready[stage] = max(ready[stage], end[i])
    return ready


def _by_time(ready: Sequence[float]) -> list[int]:
    return sorted(range(len(ready)), key=lambda stage: (ready[stage], stage))


def gradient_sync_end(
    graph: TaskGraph,
    last: dict[tuple[int, int], int],
    order: Sequence[int],
    end: Sequence[float],
    durations: Sequence[float],
    policy: Literal["lazy", "eager"],
) -> float:
    """When the last all-reduce ends that ``place_gradient_sync`` would add, from the ends of the compute tasks.

    No compute task waits for an all-reduce, so the compute is timed once and only the network lanes run here.

    Args:
        graph: compute tasks, without all-reduces.
        last: ``last_gradients(graph)``.
        order: stages in the order of their all-reduces, by ``sync_order``.
        end: of each task of the graph.
        durations: of each stage's all-reduce.
        policy: as for ``place_gradient_sync``.
    """
    free = [0.0] * graph.schedule.devices
    compute = [max(end[a:b], default=0.0) for a, b in itertools.pairwise(graph.first)]
    for stage in order:
        holders = []
        for replica, row in enumerate(graph.schedule.placement):  # one without a micro-batch takes part all the same
            ready = end[last[stage, replica]] if (stage, replica) in last else 0.0
            holders.append((row[stage], ready if policy == "eager" else max(ready, compute[row[stage]])))
        start_together(free, holders, durations[stage])
    return max(free)


def _idles(start: list[float], end: list[float], since: int, until: int) -> bool:
    """Does the device idle between the end of task ``since`` and that of ``until``?"""
    return any(start[i + 1] > end[i] for i in range(since, until))


def add_updates(schedule: Schedule) -> Schedule:
    """Append one U per held stage replica at the end of each device's order; existing ones are placed anew."""
    return schedule.with_orders(
        [*(t for t in order if t.kind != "U"), *(Task("U", stage, (), replica) for stage, replica in pairs)]
        for order, pairs in zip(schedule.orders, held(schedule), strict=True)
    )


def are_copies(schedule: Schedule) -> bool:
    """Return whether every replica has devices of its own, and all run the same order: then the devices that hold a
    stage hold the same stages, and start their collectives in one order."""
    seen: set[int] = set()
    orders = set()
    for row in schedule.placement:
        own = list(dict.fromkeys(row))
        if not seen.isdisjoint(own):
            return False
        seen.update(own)
        if schedule.replicas > 1:
            tasks = tuple(tuple((t.kind, t.stage) for t in schedule.orders[device]) for device in own)
            orders.add((tuple(map(own.index, row)), tasks))
    return len(orders) <= 1


def placement_of_copies(schedule: Schedule, copies: int) -> tuple[tuple[int, ...], ...]:
    """Return the placement of W copies of a schedule: copy w has the devices w*D + d."""
    return tuple(tuple(w * schedule.devices + d for d in row) for w in range(copies) for row in schedule.placement)


def replicate(schedule: Schedule, copies: int) -> Schedule:
    """Return W copies of a schedule, each with its own devices, replicas and micro-batches.

    With D devices, R replicas and N micro-batch ids, copy w has devices w*D + d, replicas w*R + r and ids w*N + n.

    Raises:
        ScheduleError: ``copies`` is below 1.
    """
    if copies < 1:
        raise ScheduleError("replicas", f"{copies} copies", "use a whole number >= 1")
    if copies == 1:
        return schedule
    replicas, count = schedule.replicas, schedule.microbatches
    orders = [
        [t._replace(mbs=tuple(w * count + m for m in t.mbs), replica=w * replicas + t.replica) for t in order]
        for w in range(copies)
        for order in schedule.orders
    ]
    sharding = schedule.sharding and replace(schedule.sharding, copies=copies * schedule.sharding.copies)
    joined = frozenset(
        t._replace(mbs=tuple(w * count + m for m in t.mbs), replica=w * replicas + t.replica)
        for w in range(copies)
        for t in schedule.joined
    )
    return schedule.with_orders(
        orders,
        placement=placement_of_copies(schedule, copies),
        microbatches=copies * count,
        sharding=sharding,
        joined=joined,
        exchange=(copies * schedule.exchange[0], schedule.exchange[1]),
    )
