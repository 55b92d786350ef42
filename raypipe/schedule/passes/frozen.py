"""Leave out the gradients that frozen weights need not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Backward, Schedule, Task, backwards
from raypipe.schedule.kinds import BACKWARD, JOINT, SHARDED, WEIGHT_GRADIENTS


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
