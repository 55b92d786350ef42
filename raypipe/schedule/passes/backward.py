"""Split the joint backward into B and W, join them again, and leave out what frozen stages do not need."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import floor
from typing import Literal

from raypipe.errors import ScheduleError, check_known
from raypipe.schedule.costs import CostTable, delays
from raypipe.schedule.deps import link
from raypipe.schedule.families.greedy import Policy, order_greedily, timed
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Backward, Schedule, Task, backwards
from raypipe.schedule.kinds import BACKWARD, BW, GRADIENTS, JOINT, SHARDED, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.live_activations import births, deaths, live_counts, peak_activations, recomputed_pairs
from raypipe.schedule.verify import check_links


@no_collection()
def split_backward(schedule: Schedule) -> Schedule:
    """Replace every BW by B followed directly by W, or by W alone if the stage has no B (``ir.backwards``).

    The stage before then waits for B only, so no task runs later than before.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 2; OOO backprop section 3.
    """
    backwards = schedule.backwards
    orders: list[list[Task]] = []
    for order in schedule.orders:
        new: list[Task] = []
        for task in order:
            if task.kind not in JOINT:
                new.append(task)
                continue
            if backwards[task.stage].input_grad:
                new.append(task._replace(kind="B"))
            new.append(task._replace(kind="W"))
        orders.append(new)
    return schedule.with_orders(orders)


def fuse_backward(schedule: Schedule, everywhere: bool = False) -> Schedule:
    """Join each B with its W into one BW, if the W is next in the device's order.

    Args:
        schedule: any valid schedule.
        everywhere: also join a W that comes later, at the position of its B. This is valid, because a W needs only its
            B, and only updates and all-reduces wait for the W.
    """
    orders: list[list[Task]] = []
    for order in schedule.orders:
        weights = {t[1:]: k for k, t in enumerate(order) if t.kind == "W"}
        new: list[Task] = []
        joined: set[int] = set()
        for k, task in enumerate(order):
            if k in joined:
                continue
            w = weights.get(task[1:]) if task.kind == "B" else None
            if w is not None and (w == k + 1 or (everywhere and w > k)):
                joined.add(w)
                task = task._replace(kind=BW)
            new.append(task)
        orders.append(new)
    return schedule.with_orders(orders)


@no_collection()
def without_frozen(schedule: Schedule, frozen: Collection[int]) -> Schedule:
    """Remove the tasks that frozen stages do not need; what is left keeps its order (but see ``closed_up``).

    A frozen stage has no weight gradient, so its joint backwards become B. Where no stage up to it is trained, either,
    it has no backward at all: no R, and no gradient is sent to it. Shards divide none of its weights. Its AR and U
    stay, because running statistics are summed and moved with them.

    Args:
        schedule: any valid schedule; a frozen stage stays frozen.
        frozen: stages without a trained parameter.

    Raises:
        ScheduleError: a stage does not exist, or all of them are frozen.
    """
    every = tuple(sorted({*schedule.rules.frozen, *frozen}))
    if every == schedule.rules.frozen:
        return schedule
    if not set(every) < set(range(schedule.stages)):
        raise ScheduleError(
            "frozen",
            f"stages {' '.join(map(str, every))} of {schedule.stages}",
            "leave at least one with weights to train",
        )
    rules, sharding = replace(schedule.rules, frozen=every), schedule.sharding
    needs = backwards(schedule.graph, rules)
    if sharding is not None:
        levels = tuple(n if b.weight_grad else 0 for n, b in zip(sharding.levels, needs, strict=True))
        sharding = replace(sharding, levels=levels) if any(levels) else None
    orders = [[left for t in order if (left := _left(t, needs[t.stage])) is not None] for order in schedule.orders]
    return schedule.with_orders(orders, rules=rules, sharding=sharding)


def _left(task: Task, backward: Backward) -> Task | None:
    """Return what is left of a task, if anything."""
    kind = task.kind
    if kind in JOINT and backward.input_grad and not backward.weight_grad:
        return task._replace(kind="B")
    if kind == "R" or kind in JOINT:
        needed = backward.exists
    elif kind in BACKWARD:
        needed = backward.input_grad
    else:
        needed = backward.weight_grad or kind not in WEIGHT_GRADIENTS | SHARDED
    return task if needed else None


def insert_weights(
    schedule: Schedule, costs: CostTable, patience: float = 0.5, memory_limit: Sequence[float] | None = None
) -> Schedule:
    """Move every W to where its device would otherwise be idle, the oldest W first.

    ZeroPP postpones all W, simulates the schedule and moves W into the bubbles, repeatedly. Here the bubbles are filled
    during a single simulation. If a forward would exceed a device's memory, a W runs first.

    Args:
        schedule: a schedule without all-reduces and updates; without W it is returned unchanged.
        costs: time of each task.
        patience: leave a device idle rather than start a W that would delay the next task by more than
            ``1 - patience`` of the W's time.
        memory_limit: limit on live activations per device, in units of one stage and full micro-batch; by default
            today's peaks.

    Raises:
        ScheduleError: the schedule cannot run.

    Source: ZeroPP, section 4.
    """
    graph = link(schedule)
    check_links(graph)
    durations = costs.durations(schedule, graph.tasks)
    waits = delays(schedule.placement, schedule.graph, costs.comm)
    recomputed, backwards = recomputed_pairs(schedule), schedule.backwards
    limits = peak_activations(schedule) if memory_limit is None else memory_limit
    size = float(schedule.size)
    fixed = [
        [i for i in range(graph.first[d], graph.first[d + 1]) if graph.tasks[i].kind != "W"]
        for d in range(schedule.devices)
    ]
    needed_by: dict[int, list[int]] = {}
    for i, task in enumerate(graph.tasks):
        if task.kind == "W":
            for p in graph.preds[i]:
                needed_by.setdefault(p, []).append(i)

    end: dict[int, float] = {}
    rows: list[list[Task]] = [[] for _ in range(schedule.devices)]
    alive, position, free = [0] * schedule.devices, [0] * schedule.devices, [0.0] * schedule.devices
    coming: list[list[tuple[float, int]]] = [[] for _ in range(schedule.devices)]  # W tasks by earliest start
    ready: list[list[int]] = [[] for _ in range(schedule.devices)]  # W tasks that can start now, by number
    asleep: dict[int, list[int]] = {}  # task -> devices that wait for it to start
    events = [(0.0, d) for d in range(schedule.devices)]

    def known(i: int) -> float | None:
        """Earliest start of the task, ignoring its device; None if a predecessor has not started yet."""
        at = 0.0
        _, stage, _, replica = graph.tasks[i]
        for p in graph.preds[i]:
            if p not in end:
                return None
            at = max(at, end[p] + (waits[replica][stage][graph.tasks[p].stage] if waits is not None else 0.0))
        return at

    def run(i: int, d: int, now: float) -> None:
        alive[d] += births(graph.tasks[i], recomputed) - deaths(graph.tasks[i], backwards)
        end[i] = free[d] = now + durations[i]
        rows[d].append(graph.tasks[i])
        heapq.heappush(events, (end[i], d))
        for w in needed_by.get(i, ()):
            if (at := known(w)) is not None:
                heapq.heappush(coming[graph.device[w]], (at, w))
                heapq.heappush(events, (at, graph.device[w]))
        for other in asleep.pop(i, ()):
            heapq.heappush(events, (now, other))

    while events:
        now, d = heapq.heappop(events)
        if now < free[d]:
            continue  # the device is busy; the end of its task is another event
        while coming[d] and coming[d][0][0] <= now:
            heapq.heappush(ready[d], heapq.heappop(coming[d])[1])
        # The next task in the order, or both halves of a pair.
        following = graph.halves(fixed[d][position[d]]) if position[d] < len(fixed[d]) else ()
        starts = [known(i) for i in following]
        at = None if None in starts else max((start for start in starts if start is not None), default=float("inf"))
        born = sum(births(graph.tasks[i], recomputed) for i in following)
        full = bool(following) and (alive[d] + born) * size > limits[d]
        if ready[d] and (full or at is None or at - now >= patience * durations[ready[d][0]]):
            run(heapq.heappop(ready[d]), d, now)
        elif not following or full:
            continue  # the arrival of the next W is another event
        elif at is None:
            asleep.setdefault(next(p for i in following for p in graph.preds[i] if p not in end), []).append(d)
        elif at > now:
            heapq.heappush(events, (at, d))
        else:
            position[d] += len(following)
            for i in following:
                run(i, d, now)
    return schedule.with_orders(rows)


# Recomputation: drop activations after the forward and recompute them before the backward.


def add_recompute(
    schedule: Schedule, when: Literal["early", "late"] = "late", stages: Collection[int] | None = None
) -> Schedule:
    """Insert an R right before the first backward task of every micro-batch on the given stages that have any.

    Args:
        schedule: any valid schedule; its R tasks on other stages are kept, those on the given stages are replaced.
        when: with ``late``, R also waits for the incoming gradient; with ``early``, only for its own forward, so that
            it can run while the device waits for that gradient (Merak section 3.3). The rule applies to the whole
            schedule.
        stages: the stages that recompute; by default all. An empty collection removes every R.

    Raises:
        ScheduleError: a stage does not exist, or ``when`` is unknown.
    """
    check_known(ScheduleError, "recompute", when, ("early", "late"))
    chosen = set(range(schedule.stages)) if stages is None else set(stages)
    if not chosen <= set(range(schedule.stages)):
        raise ScheduleError("recompute", f"stage {max(chosen)} of {schedule.stages}", f"use 0 to {schedule.stages - 1}")
    orders: list[list[Task]] = []
    for order in schedule.orders:
        new: list[Task] = []
        recomputed: set[tuple[int, int]] = set()
        for task in order:
            if task.kind == "R" and (task.stage in chosen or not chosen):
                continue
            if task.kind in GRADIENTS and task.stage in chosen:
                fresh = [mb for mb in task.mbs if (task.stage, mb) not in recomputed]
                recomputed.update((task.stage, mb) for mb in fresh)
                at = len(new) - (task in schedule.joined)  # not between the halves of a pair
                new[at:at] = [Task("R", task.stage, (mb,), task.replica) for mb in fresh]
            new.append(task)
        orders.append(new)
    return schedule.with_orders(orders, rules=replace(schedule.rules, recompute=when))


def keep_activations(schedule: Schedule, shares: Sequence[float]) -> Schedule:
    """Remove R from an evenly spread share of each stage's micro-batches, which then keep their activations.

    This uses memory that full recomputation leaves free. Merak keeps the activations of a share of a stage's modules; a
    share of its micro-batches saves the same time and takes the same memory on average, without dividing a stage.

    Args:
        schedule: a schedule with recomputation; stages without it do not change.
        shares: per stage, from 0 (recompute every micro-batch) to 1 (keep all).

    Raises:
        ScheduleError: there is not one share per stage, or a share is not from 0 to 1.

    Source: Lai et al. 2022 (Merak), section 3.4; by micro-batch: Korthikanti et al. 2022, arXiv:2205.05198,
    appendix C.
    """
    if len(shares) != schedule.stages:
        raise ScheduleError("keep", f"{len(shares)} shares for {schedule.stages} stages", "give one per stage")
    for stage, share in enumerate(shares):
        if not 0 <= share <= 1:
            raise ScheduleError("keep", f"the share for stage {stage} is {share}", "use 0 to 1")
    seen: dict[tuple[int, int], int] = {}
    kept: set[tuple[int, int, int]] = set()
    for task in schedule.tasks():
        if task.kind != "R":
            continue
        n = seen[task.stage, task.replica] = seen.get((task.stage, task.replica), 0) + 1
        share = shares[task.stage] + 1e-9
        if floor(n * share) > floor((n - 1) * share):
            kept.update((task.stage, task.replica, mb) for mb in task.mbs)
    return schedule.with_orders(
        [t for t in order if t.kind != "R" or (t.stage, t.replica, t.mbs[0]) not in kept] for order in schedule.orders
    )


# Close the gaps that tasks leave which frozen stages need not run.


ORDERS: tuple[tuple[Kind, ...], ...] = ((BW, "B", "F", "W"), ("F", BW, "B", "W"))
"""Kinds by priority: gradients are sent on first, or forwards run ahead as far as memory allows."""
WAYS = ((1.0, 0.0), (1.0, 0.1), (0.2, 0.1))
"""Times of a W (short for adapters) and of a message, in those of an F or a B, for which no order is to be longer."""
MOST = 2048
"""Stages times micro-batches of a step beyond which it stays as it is: a planner asks for many of them."""


def closed_up(schedule: Schedule) -> Schedule:
    """Return a shorter order of the same tasks in the same memory, or the schedule itself.

    A free device starts what it may of the next tasks in the present order, by kind, while it holds no more activations
    than it does at most in that order. What is found is taken if it is no longer for any of a few costs, and shorter
    for one of them.

    Args:
        schedule: of one copy: forwards and backwards of single micro-batches. Others are returned as they are.
    """
    tasks = [task for order in schedule.orders for task in order]
    plain = all(task.kind in ORDERS[0] and len(task.mbs) == 1 for task in tasks)
    if not plain or schedule.versions != "flush" or schedule.stages * schedule.microbatches * schedule.size > MOST:
        return schedule
    limits = [max(row, default=0) for row in live_counts(schedule)]
    place = {task: n for order in schedule.orders for n, task in enumerate(order)}
    tables = [CostTable.even(schedule.stages, weight_grad=w, comm=comm) for w, comm in WAYS]
    best, known = schedule, _lengths(schedule, tables)
    for kinds in ORDERS:
        result = order_greedily(
            schedule.unpaired(), tables[1], Policy(kinds=kinds, key=lambda t: (place[t],), limit=limits)
        )
        if result is None or result.schedule.orders == best.orders:
            continue
        lengths = _lengths(result.schedule, tables)
        no_longer = all(new <= old + 1e-9 for new, old in zip(lengths, known, strict=True))
        if no_longer and sum(lengths) < sum(known) - 1e-9:
            best, known = result.schedule, lengths
    return best


def _lengths(schedule: Schedule, tables: Iterable[CostTable]) -> list[float]:
    """Return how long a step takes and how long its busiest device: steps that follow one another may take no more."""
    graph = link(schedule)
    return [length for table in tables for length in timed(graph, table)[1:]]
