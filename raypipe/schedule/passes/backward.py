"""Split the joint backward into B and W, join them again, and leave out what frozen stages do not need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Backward, Schedule, Task, backwards
from raypipe.schedule.kinds import BACKWARD, BW, JOINT, SHARDED, WEIGHT_GRADIENTS


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
