"""Drop activations after the forward and rebuild them before the backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule, Task


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
            if task.kind in ("B", "W", "BW") and task.stage in chosen:
                fresh = [mb for mb in task.mbs if (task.stage, mb) not in rebuilt]
                rebuilt.update((task.stage, mb) for mb in fresh)
                new += [Task("R", task.stage, (mb,), task.replica) for mb in fresh]
            new.append(task)
        orders.append(new)
    return schedule.with_orders(orders, rules=replace(schedule.rules, recompute=when))
