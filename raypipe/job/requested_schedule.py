"""The schedule that a job asks for: one of the named ones, or a file written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raypipe.errors import ScheduleError
from raypipe.files import expanded
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.forms.schedule_file import load
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import BOOKKEEPING
from raypipe.schedule.live_activations import check_memory, peak_activations
from raypipe.schedule.passes import add_recompute, keep_activations
from raypipe.schedule.shape import Shape
from raypipe.schedule.verify import verify


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
    schedule, _ = load(expanded(Path(parallel.schedule)))
    return fitting(schedule, parallel, batch, parallel.schedule)


def fitting(schedule: Schedule, parallel: ParallelSpec, batch: int, source: str) -> Schedule:
    """A schedule that was read, not generated, without its gradient syncs and updates; held against the job's shape.

    A schedule of fewer micro-batches than the job's would train a part of each mini-batch, and divide its loss by all.

    Args:
        schedule: one data-parallel copy.
        parallel: what the job asks for.
        batch: ``train.batch``.
        source: what the schedule was read from, for messages.

    Raises:
        ScheduleError: it cannot run, or its devices, micro-batches or graph of stages are not the job's.
    """
    shape = parallel.shape(batch)
    bare = schedule.with_orders([t for t in order if t.kind not in BOOKKEEPING] for order in schedule.orders)
    verify(bare)
    for what, have, want in (
        ("devices", schedule.devices, shape.devices),
        ("microbatches", schedule.microbatches * schedule.size, shape.microbatches),
    ):
        if have != want:
            raise ScheduleError(what, f"{source} has {have} {what}, the job {want}", "make them agree")
    if schedule.graph != StageGraph.chain(schedule.stages):
        raise ScheduleError(
            "edges", f"{source} has edges that make no chain, and a job's stages are one", "leave the edges out"
        )
    return bare


LONG = 20_000
"""Stages times micro-batches above which a step is not made only to be looked at: a second or so."""


def looked_at(parallel: ParallelSpec, batch: int) -> Schedule:
    """What tells the placement, the kinds of task and whether the schedule can be: ``base_schedule``, or of a long step
    one of the same shape with fewer micro-batches.

    A long step's activations are told from two shorter ones; a run, which makes it whole, counts them.

    Raises:
        ScheduleError: as ``base_schedule``.
    """
    shape = parallel.shape(batch)
    family = SCHEDULES.get(parallel.schedule)
    if family is None or family.stages(shape) * shape.microbatches <= LONG:
        return base_schedule(parallel, batch)
    turn = 2 * shape.devices
    few = max(1, LONG // family.stages(shape))
    few -= (few - shape.microbatches) % turn if few > turn else 0

    def short(count: int) -> Schedule:
        unit = None if shape.unit is None else min(shape.unit, count)
        return _generated(parallel, replace(shape, microbatches=count, unit=unit))

    try:
        schedule = short(few)
    except ScheduleError as error:
        if error.where != "microbatches":  # too few of them for so many devices
            raise
        few = min(shape.devices, shape.microbatches)
        schedule = short(few)
    limit = shape.memory_limit
    if limit is not None and "memory_limit" not in family.options and few > turn:
        peak = max(peak_activations(_as_held(parallel, schedule)))
        growth = peak - max(peak_activations(_as_held(parallel, short(few - turn))))
        if (peak := peak + growth * (shape.microbatches - few) / turn) > limit:
            raise ScheduleError(
                "memory_limit", f"{parallel.schedule} holds {peak:g} activations, the limit is {limit:g}",
                "raise the limit, or choose a schedule or shape that holds fewer",
            )  # fmt: skip
    return schedule


def _generated(parallel: ParallelSpec, shape: Shape) -> Schedule:
    """The named schedule; one that is recomputed whole is held against the memory limit as it will be."""
    name, limit = parallel.schedule, shape.memory_limit
    family = SCHEDULES.get(name)
    if limit is None or parallel.recompute != "full" or family is None or "memory_limit" in family.options:
        return generate(name, shape)
    schedule = generate(name, replace(shape, memory_limit=None))
    check_memory(_as_held(parallel, schedule), limit)
    return schedule


def _as_held(parallel: ParallelSpec, schedule: Schedule) -> Schedule:
    """With the recomputation that counts for the memory limit: of whole micro-batches."""
    if parallel.recompute != "full":
        return schedule
    again = add_recompute(schedule, "early")
    return again if parallel.keep is None else keep_activations(again, parallel.keep)
