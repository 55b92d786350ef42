"""Recomputation: drop activations after the forward and recompute them before the backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import floor
from typing import Literal

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import GRADIENTS


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
    if when not in ("early", "late"):
        raise ScheduleError("recompute", f'"{when}" is unknown', "use early or late")
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
                new += [Task("R", task.stage, (mb,), task.replica) for mb in fresh]
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
