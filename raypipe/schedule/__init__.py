"""Schedules as data: the IR, one dependency rule, generators by name, passes and the verifier."""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families import chimera, gpipe, one_f_one_b
from raypipe.schedule.family import Family
from raypipe.schedule.ir import Schedule
from raypipe.schedule.memory import check_memory
from raypipe.schedule.shape import Shape

__all__ = ["SCHEDULES", "Family", "Shape", "generate", "stages_of"]

SCHEDULES: dict[str, Family] = {
    "gpipe": Family(make=gpipe.gpipe, about="all forwards, then all backwards"),
    "1f1b": Family(make=one_f_one_b.one_f_one_b, about="warm up, then one forward for one backward, then drain"),
    "dapple": Family(make=one_f_one_b.one_f_one_b, about="the same as 1f1b"),
    "interleaved-1f1b": Family(
        make=one_f_one_b.interleaved, about="1F1B with several stages a device: smaller bubbles, more messages",
        options=frozenset({"chunks"}),
    ),
    "chimera": Family(
        make=chimera.direct, about="bidirectional pipelines: half the bubbles for two copies of the weights",
        options=frozenset({"pipelines", "concat"}),
    ),
}  # fmt: skip
"""Every schedule that has a name."""


def _family(name: str) -> Family:
    if name not in SCHEDULES:
        raise ScheduleError("schedule", f'"{name}" is unknown', nearest(name, SCHEDULES))
    return SCHEDULES[name]


def stages_of(name: str, shape: Shape) -> int:
    """Stages of one replica that ``generate`` will make; the length of a cost table's lists.

    Raises:
        ScheduleError: unknown name, or an option this family has no use for.
    """
    family = _family(name)
    family.check(name, shape)
    return family.stages(shape)


def generate(name: str, shape: Shape, costs: CostTable | None = None) -> Schedule:
    """Make the named schedule.

    Args:
        name: a key of ``SCHEDULES``.
        shape: devices, micro-batches and the family's options.
        costs: one value per stage; some families order their tasks by cost. Default: F = B = W = 1.

    Raises:
        ScheduleError: unknown or misspelt name, a shape the family does not exist for, costs for another number of
            stages, or more activations than ``shape.memory_limit`` allows.
    """
    stages = stages_of(name, shape)
    costs = CostTable.even(stages) if costs is None else costs
    if costs.stages != stages:
        raise ScheduleError("costs", f"{costs.stages} values for {stages} stages", f"give 1 or {stages} values")
    schedule = replace(_family(name).make(shape, costs), name=name)
    if shape.memory_limit is not None:
        check_memory(schedule, shape.memory_limit)
    return schedule
