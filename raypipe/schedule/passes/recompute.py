"""Drop activations after the forward and rebuild them before the backward."""

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
    """Put an R right before the first backward task of every micro-batch on the given stages.

    Args:
        schedule: any valid schedule; R tasks it has on other stages are kept, on the given ones placed anew.
        when: ``late``: R also waits for the incoming gradient; ``early``: for its own forward only, so that it fills
            the wait for that gradient (Merak section 3.3). One rule holds for the whole schedule.
        stages: all by default; empty removes every R.

    Raises:
        ScheduleError: a stage that does not exist, or an unknown rule.
    """
    if when not in ("early", "late"):
        raise ScheduleError("recompute", f'"{when}" is unknown', "use early or late")
    chosen = set(range(schedule.stages)) if stages is None else set(stages)
    if not chosen <= set(range(schedule.stages)):
        raise ScheduleError("recompute", f"stage {max(chosen)} of {schedule.stages}", f"use 0 to {schedule.stages - 1}")
    orders: list[list[Task]] = []
    for order in schedule.orders:
        new: list[Task] = []
        rebuilt: set[tuple[int, int]] = set()
        for task in order:
            if task.kind == "R" and (task.stage in chosen or not chosen):
                continue
            if task.kind in GRADIENTS and task.stage in chosen:
                fresh = [mb for mb in task.mbs if (task.stage, mb) not in rebuilt]
                rebuilt.update((task.stage, mb) for mb in fresh)
                new += [Task("R", task.stage, (mb,), task.replica) for mb in fresh]
            new.append(task)
        orders.append(new)
    return schedule.with_orders(orders, rules=replace(schedule.rules, recompute=when))


def keep_activations(schedule: Schedule, shares: Sequence[float]) -> Schedule:
    """Take the R away from a share of each stage's micro-batches, evenly spread: these keep their activations.

    How a stage uses memory that recomputing everything would leave empty. Merak keeps a share of a stage's modules;
    a share of its micro-batches saves the same time and takes the same memory on average, and needs no cut through a
    stage.

    Args:
        schedule: one with recomputation; stages without stay as they are.
        shares: per stage, 0 (recompute every micro-batch) to 1 (keep all).

    Raises:
        ScheduleError: not one share from 0 to 1 per stage.

    Source: Lai et al. 2022 (Merak), section 3.4; by micro-batch: Korthikanti et al. 2022, arXiv:2205.05198,
    appendix C.
    """
    if len(shares) != schedule.stages:
        raise ScheduleError("keep", f"{len(shares)} shares for {schedule.stages} stages", "give one per stage")
    for stage, share in enumerate(shares):
        if not 0 <= share <= 1:
            raise ScheduleError("keep", f"{share} of stage {stage}", "use 0 to 1")
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
