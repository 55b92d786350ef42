"""The schedule that a job asks for: one of the named ones, or a file written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.load import load
from raypipe.schedule.memory import check_memory
from raypipe.schedule.passes import add_recompute, keep_activations
from raypipe.schedule.shape import Shape
from raypipe.schedule.verify import verify

if TYPE_CHECKING:
    from raypipe.job.spec import ParallelSpec


def is_file(name: str) -> bool:
    """Whether ``parallel.schedule`` names a file: it has a suffix or a folder, which no schedule's name has."""
    return "." in name or "/" in name


def base_schedule(parallel: ParallelSpec, batch: int) -> Schedule:
    """The order of one data-parallel copy, before replication, gradient sync and updates.

    Raises:
        ScheduleError: no such name or file, a shape that cannot be, or a file whose devices or micro-batches differ
            from the job's.
    """
    shape = parallel.shape(batch)
    if not is_file(parallel.schedule):
        return _generated(parallel, shape)
    schedule, _ = load(Path(parallel.schedule).expanduser())
    bare = schedule.with_orders([t for t in order if t.kind not in ("AR", "U")] for order in schedule.orders)
    verify(bare)
    for what, have, want in (
        ("devices", schedule.devices, shape.devices),
        ("microbatches", schedule.microbatches * schedule.size, shape.microbatches),
    ):
        if have != want:
            raise ScheduleError(what, f"{parallel.schedule} has {have} {what}, the job {want}", "make them agree")
    return bare


def _generated(parallel: ParallelSpec, shape: Shape) -> Schedule:
    """The named schedule; one that is recomputed whole is held against the memory limit as it will be."""
    name, limit = parallel.schedule, shape.memory_limit
    family = SCHEDULES.get(name)
    if limit is None or parallel.recompute != "full" or family is None or "memory_limit" in family.options:
        return generate(name, shape)
    schedule = generate(name, replace(shape, memory_limit=None))
    again = add_recompute(schedule, "early")
    check_memory(again if parallel.keep is None else keep_activations(again, parallel.keep), limit)
    return schedule
