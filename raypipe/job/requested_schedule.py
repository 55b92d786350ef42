"""The schedule that a job asks for: a named one, or one from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import floor
from pathlib import Path

from raypipe.errors import ScheduleError, SpecError, nearest
from raypipe.files import expanded
from raypipe.job.parallel_spec import ParallelSpec, Shard
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.families.vocabulary import graph_of
from raypipe.schedule.forms.json_form import load
from raypipe.schedule.ir import Schedule, Sharding, StageGraph
from raypipe.schedule.kinds import BOOKKEEPING, SHARDED
from raypipe.schedule.live_activations import check_memory, peak_activations
from raypipe.schedule.passes import add_recompute, keep_activations
from raypipe.schedule.shape import Shape
from raypipe.schedule.verify import verify


def is_file(name: str) -> bool:
    """Return whether ``parallel.schedule`` is a file: it contains a dot or a slash, which no schedule's name does."""
    return "." in name or "/" in name


def base_schedule(parallel: ParallelSpec, batch: int) -> Schedule:
    """Return the schedule of one data-parallel copy, before replication, gradient sync and updates.

    Raises:
        ScheduleError: there is no such name or file, the shape is impossible, or a file's devices or micro-batches
            differ from the job's.
    """
    shape = parallel.shape(batch)
    if not is_file(parallel.schedule):
        return _generated(parallel, shape)
    schedule, _ = load(expanded(Path(parallel.schedule)))
    return fitting(schedule, parallel, batch, parallel.schedule)


def fitting(schedule: Schedule, parallel: ParallelSpec, batch: int, source: str) -> Schedule:
    """Check a schedule that was read, not generated, against the job's shape; return it without AR and U tasks.

    Gathers of its own (AG, FREE, RS) stay where the job says ``gather: order`` and has copies that divide anything.
    With fewer micro-batches than the job, it would train on only a part of each mini-batch but divide the loss by all.

    Args:
        schedule: one data-parallel copy.
        parallel: the job's ``parallel`` section.
        batch: ``train.batch``.
        source: where the schedule was read from, for messages.

    Raises:
        ScheduleError: the schedule cannot run, or its devices, micro-batches, stage graph or shards differ from the
            job's.
    """
    dropped = BOOKKEEPING
    if schedule.sharding is not None:
        check_shards(schedule, parallel, source, parallel.shard)
        if parallel.gather != "order":
            raise ScheduleError(
                "gather",
                f"{source} has gathers of its own, the job asks for one per {parallel.gather}",
                "set parallel.gather to order, or leave AG, FREE, RS and zero out of the schedule",
            )
        if parallel.replicas > 1:
            dropped = BOOKKEEPING - SHARDED
        else:  # nobody to divide anything with
            schedule = replace(schedule, sharding=None)
    bare = schedule.without(dropped)
    verify(bare)
    check_shape(bare, parallel, batch, source)
    return bare


def check_shape(schedule: Schedule, parallel: ParallelSpec, batch: int, source: str) -> None:
    """Check a schedule of one data-parallel copy against the job's shape; arguments as of ``fitting``.

    Raises:
        ScheduleError: its devices, micro-batches or stage graph differ from the job's.
    """
    shape = parallel.shape(batch)
    for what, have, want in (
        ("devices", schedule.devices, shape.devices),
        ("microbatches", schedule.microbatches * schedule.size, shape.microbatches),
        ("slices", schedule.rules.slices, shape.slices),
    ):
        if have != want:
            raise ScheduleError(what, f"{source} has {have} {what}, the job {want}", "make them agree")
    split = parallel.vocabulary == "split"
    asked = graph_of(parallel.stages) if split else StageGraph.chain(schedule.stages)
    if schedule.graph != asked and parallel.placement != "branches":
        what = "those of a divided head" if split else "a chain"
        raise ScheduleError(
            "edges",
            f"{source} has edges that are not {what}, but the job's stages are",
            "make a new plan" if split else "leave the edges out, or use a plan with placement: branches",
        )


def check_shards(schedule: Schedule, parallel: ParallelSpec, source: str, shard: Shard) -> None:
    """Check that a schedule of one data-parallel copy divides what the job says: ``shard`` of its trained stages.

    Raises:
        ScheduleError: it divides something else, or among others.
    """
    sharding = schedule.sharding or Sharding(levels=(0,) * schedule.stages, group=parallel.shard_replicas)
    trained = [n for n, backward in zip(sharding.levels, schedule.backwards, strict=True) if backward.weight_grad]
    words = {f"zero{level}" if level else "none" for level in trained}
    if sharding.copies != 1:
        raise ScheduleError("copies", f"{source} holds {sharding.copies} copies", "give the order of one")
    if words != {shard}:
        raise ScheduleError(
            "shard",
            f"{source} divides {', '.join(sorted(words))}, the job {shard}",
            f"set parallel.shard to {words.pop()}" if len(words) == 1 else "give all stages one level",
        )
    if sharding.group != parallel.shard_replicas:
        raise ScheduleError(
            "shard_replicas",
            f"{source} has shard groups of {sharding.group or 'all copies'}, the job of "
            f"{parallel.shard_replicas or 'all copies'}",
            "make them agree",
        )


LONG = 20_000
"""Steps with more stages times micro-batches are not generated for a check, since that takes a second or more."""


def checked_schedule(parallel: ParallelSpec, batch: int) -> Schedule:
    """Return ``base_schedule`` or, for a long step, one of the same shape with fewer micro-batches, to check a job.

    Both have the same placement and kinds of tasks and are refused for the same reasons. The activations of a long step
    are extrapolated from two shorter ones; a run generates the whole step and counts them exactly.

    Raises:
        ScheduleError: as for ``base_schedule``.
    """
    shape = parallel.shape(batch)
    family = SCHEDULES.get(parallel.schedule)
    each = family.stages(shape) * shape.slices if family is not None else 1
    if family is None or each * shape.microbatches <= LONG:
        return base_schedule(parallel, batch)
    turn = 2 * shape.devices
    few = max(1, LONG // each)
    few -= (few - shape.microbatches) % turn if few > turn else 0

    def short(count: int) -> Schedule:
        unit = None if shape.unit is None else min(shape.unit, count)
        return _generated(parallel, replace(shape, microbatches=count, unit=unit))

    try:
        schedule = short(few)
    except ScheduleError as error:
        if error.where != "microbatches":  # the short step has too few micro-batches for so many devices
            raise
        few = min(shape.devices, shape.microbatches)
        schedule = short(few)
    limit = shape.memory_limit
    if limit is not None and "memory_limit" not in family.options and few > turn:
        peak = max(peak_activations(_recomputed(parallel, schedule)))
        growth = peak - max(peak_activations(_recomputed(parallel, short(few - turn))))
        if (peak := peak + growth * (shape.microbatches - few) / turn) > limit:
            raise ScheduleError(
                "memory_limit",
                f"{parallel.schedule} holds {peak:g} activations, the limit is {limit:g}",
                "raise the limit, or choose a schedule or shape that holds fewer",
            )
    return schedule


def _generated(parallel: ParallelSpec, shape: Shape) -> Schedule:
    """Generate the named schedule; with full recomputation, check the memory limit against the recomputed schedule."""
    name, limit = parallel.schedule, shape.memory_limit
    family = SCHEDULES.get(name)
    if limit is None or parallel.recompute != "full" or family is None or "memory_limit" in family.options:
        return generate(name, shape)
    schedule = generate(name, replace(shape, memory_limit=None))
    check_memory(_recomputed(parallel, schedule), limit)
    return schedule


def _recomputed(parallel: ParallelSpec, schedule: Schedule) -> Schedule:
    """Add the recomputation that counts for the memory limit: that of whole stages."""
    if parallel.recompute != "full":
        return schedule
    recomputed = add_recompute(schedule, "early")
    return recomputed if parallel.keep is None else keep_activations(recomputed, parallel.keep)


# The layers that a job recomputes instead of keeping their activations.


Cut = Sequence[Sequence[int]]


def layers_to_recompute(parallel: ParallelSpec, cut: Cut) -> frozenset[int] | None:
    """Return the layers that R recomputes; None if ``recompute`` does not select layers, so R recomputes whole stages.

    With ``stage-aware``, a stage keeps the activations of its first layers and recomputes the later ones, so that only
    one layer's output has to be kept between the two parts.
    """
    if isinstance(parallel.recompute, tuple):
        return frozenset(i for i in parallel.recompute if isinstance(i, int))
    if parallel.recompute != "stage-aware":
        return None
    return recomputed_after(cut, kept_shares(parallel, len(cut)))


def kept_shares(parallel: ParallelSpec, stages: int) -> tuple[float, ...]:
    """Return, for ``stage-aware``, the share of each stage's layers that keep their activations.

    Without ``alphas`` the first stage's share is 0, the start of the search for it.
    """
    given = parallel.alphas
    return given if isinstance(given, tuple) else alphas(stages, given or 0.0)


def recomputed_after(cut: Cut, shares: Sequence[float]) -> frozenset[int]:
    """Return the layers to recompute: each stage keeps its first ``share`` of layers, rounded down."""
    return frozenset(
        i for layers, share in zip(cut, shares, strict=True) for i in layers[floor(share * len(layers) + 1e-9) :]
    )


def named_layers(wanted: Sequence[int | str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the layers given by number, name or pattern.

    Raises:
        SpecError: a number, name or pattern matches no layer.
    """
    result: set[int] = set()
    for one in wanted:
        if isinstance(one, int):
            if not 0 <= one < len(names):
                why = f"there is no layer {one}: the model has {len(names)}"
                raise SpecError("parallel.recompute", why, f"use 0 to {len(names) - 1}")
            result.add(one)
            continue
        hits = [i for i, name in enumerate(names) if fnmatchcase(name, one)]
        if not hits:
            raise SpecError("parallel.recompute", f'no layer is called "{one}"', nearest(one, names))
        result.update(hits)
    return tuple(sorted(result))


def alphas(stages: int, first: float) -> tuple[float, ...]:
    """Merak's stage-aware recomputation: the share of each stage's layers that keeps its activations, under 1F1B.

    Stage i of s (from 1) has s - i micro-batches in flight beside the one that goes back, so keeping a share a_i of
    its layers takes (s - i) a_i activations more than recomputing them all. That is the same on every stage with
    a_i = (s - 1) a_1 / (s - i), and never more than 1. In the shifted critical path the stage before the last has one
    micro-batch more, as many as the one before it, and the last has nothing in flight.

    >>> alphas(4, 0.5)
    (0.5, 0.75, 0.75, 1.0)

    Raises:
        ScheduleError: a share that is none.

    Source: Lai et al. 2022 (Merak), arXiv:2206.04959, section 5.2.
    """
    if not 0 <= first <= 1:
        raise ScheduleError("alphas", f"{first} of the first stage", "use 0 to 1")
    if stages == 1:
        return (1.0,)
    result = [first, *(min(1.0, (stages - 1) * first / (stages - i)) for i in range(2, stages - 1))]
    return (*result[: stages - 1], *result[-1:] * (stages - 1 - len(result)), 1.0)
