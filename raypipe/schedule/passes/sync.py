"""Where the replicas of a stage all-reduce their gradients, and where weights are updated."""

from __future__ import annotations

from typing import Literal, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.faults import check_links, check_ran
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.walk import walk

Sync = Literal["lazy", "eager", "eager-opt"]


def held(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Per device, the (stage, replica) pairs it holds, by stage."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(schedule.devices)]
    for replica, placement in enumerate(schedule.placement):
        for stage, device in enumerate(placement):
            rows[device].append((stage, replica))
    return [sorted(row) for row in rows]


def place_gradient_sync(
    schedule: Schedule, policy: Sync, costs: CostTable | None = None, copies: int = 1, graph: TaskGraph | None = None
) -> Schedule:  # fmt: skip
    """Insert one AR per held stage replica, for stages that more than one replica holds.

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
    if policy not in get_args(Sync):
        raise ScheduleError("sync", f'"{policy}" is unknown', nearest(str(policy), get_args(Sync)))
    bare = schedule.with_orders([t for t in order if t.kind != "AR"] for order in schedule.orders)
    if bare.replicas * copies < 2:
        return bare
    costs = CostTable.even(bare.stages) if costs is None else costs
    graph = link(bare) if graph is None else graph
    check_links(graph)
    durations = costs.durations(bare, graph.tasks)
    done = walk(graph, durations, costs.comm)
    check_ran(graph, done)

    ready = dict.fromkeys(range(bare.stages), 0.0)
    last: dict[tuple[int, int], int] = {}
    for i, task in enumerate(graph.tasks):
        if task.kind in WEIGHT_GRADIENTS:
            ready[task.stage] = max(ready[task.stage], done.end[i])
            last[task.stage, task.replica] = i
    turn = {stage: n for n, stage in enumerate(sorted(ready, key=lambda s: (ready[s], s)))}

    orders: list[list[Task]] = []
    for d, pairs in enumerate(held(bare)):
        first, order = graph.first[d], list(bare.orders[d])
        work = [k for k, t in enumerate(order) if t.kind != "U"]
        close = work[-1] + 1 if work else 0  # after compute, before updates
        after: dict[int, list[Task]] = {}
        at = 0
        for stage, replica in sorted(pairs, key=lambda pair: (turn[pair[0]], pair)):
            own = last[stage, replica] - first + 1 if (stage, replica) in last else 0
            eager = policy == "eager" or (
                policy == "eager-opt" and _idles(done.start, done.end, first + own - 1, first + close - 1)
            )
            at = max(at, own if eager else close)
            after.setdefault(at, []).append(Task("AR", stage, (), replica))
        new = list(after.get(0, []))
        for k, task in enumerate(order):
            new += [task, *after.get(k + 1, [])]
        orders.append(new)
    return bare.with_orders(orders)


def _idles(start: list[float], end: list[float], since: int, until: int) -> bool:
    """Does the device idle between the end of task ``since`` and that of ``until``?"""
    return any(start[i + 1] > end[i] for i in range(since, until))


def add_updates(schedule: Schedule) -> Schedule:
    """Append one U per held stage replica at the end of each device's order; existing ones are placed anew."""
    return schedule.with_orders(
        [*(t for t in order if t.kind != "U"), *(Task("U", stage, (), replica) for stage, replica in pairs)]
        for order, pairs in zip(schedule.orders, held(schedule), strict=True)
    )
