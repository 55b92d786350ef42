"""Rules of the schedule that a job asks for: its name, shape and options, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from raypipe.errors import ScheduleError
from raypipe.job.model_spec import GptSpec, ModelSpec
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import checked_schedule
from raypipe.job.rules.no_effect import BrokenRule
from raypipe.job.train_spec import TrainSpec
from raypipe.schedule.passes.sync import BY_LAYER
from raypipe.schedule.shape import OPTIONS
from raypipe.search.placements import placed

if TYPE_CHECKING:
    from raypipe.schedule.ir import Schedule

KEYS = {"devices": "stages", "microbatches": "microbatch"}
"""Names in errors about a shape -> the corresponding keys of ``parallel``."""


def schedule_rules(
    model: ModelSpec, train: TrainSpec, parallel: ParallelSpec, planned: Schedule | None
) -> Iterator[BrokenRule]:
    """Errors of the schedule: an unknown name, an impossible shape, or an option that it does not have."""
    # The number of a captured model's layers is only known after capturing it.
    layers = model.layers if isinstance(model, GptSpec) else None
    if parallel.placement != "line" and parallel.schedule != "auto":
        why = f"{parallel.schedule} has a fixed placement"
        yield "parallel.placement", why, "leave it out, or use schedule: auto"
    try:
        if parallel.schedule == "auto":
            if parallel.placement == "free":  # a plan's order says which
                return
            if parallel.placement == "branches":
                yield from _branches(model, parallel)
                return
            if parallel.placement == "encoder" and isinstance(model, GptSpec):
                yield "parallel.placement", "the built-in GPT reads tokens alone and has no encoder", "use line"
                return
            placement = placed(parallel.placement, parallel.shape(train.batch))
            yield from depth(len(placement[0]), parallel.stages, layers)
            yield from _keep(parallel, placement)
            return
        schedule = planned or checked_schedule(parallel, train.batch)
    except ScheduleError as error:
        key = KEYS.get(error.where, error.where)
        yield f"parallel.{key if key in type(parallel).model_fields else 'schedule'}", _why(error), error.fix
        return
    split = parallel.vocabulary == "split"
    yield from depth(parallel.stages if split else schedule.stages, parallel.stages, layers)
    yield from _keep(parallel, schedule.placement)
    if parallel.memory_cap_mb is not None and schedule.versions != "flush":
        yield (
            "parallel.memory_cap_mb",
            f"{parallel.schedule} never flushes, so shares cannot change between steps",
            "give alphas, or use a synchronous schedule",
        )
    if parallel.replan and schedule.versions != "flush":
        yield (
            "parallel.replan",
            f"{parallel.schedule} never flushes, so plans cannot change between steps",
            "leave it out, or use a synchronous schedule",
        )
    if parallel.microbatch % (parts := schedule.share_of_samples.denominator):
        yield (
            "parallel.microbatch",
            f"{parallel.microbatch} sequences do not divide into {parts} halves",
            f"use a multiple of {parts}",
        )
    if parallel.sub_pipelined:
        yield from _halves(parallel, schedule)
    if schedule.versions != "flush" and parallel.sync in BY_LAYER:
        why = f"{parallel.sync} needs a synchronous schedule, and {parallel.schedule} never flushes"
        yield "parallel.sync", why, "use sync: lazy"
    if schedule.versions != "flush" and train.cuda_graphs in ("tasks", "step"):
        why = f"{parallel.schedule} keeps several versions of the weights, and graphs read fixed addresses"
        yield "train.cuda_graphs", why, "use none, or another schedule"
    if schedule.versions != "flush" and parallel.side_stream is not None:
        why = f"a second stream needs a synchronous schedule, and {parallel.schedule} never flushes"
        yield "parallel.side_stream", why, "leave it out, or use another schedule"
    if schedule.versions == "stash":
        yield from stash(model, train, parallel)


def _halves(parallel: ParallelSpec, schedule: Schedule) -> Iterator[BrokenRule]:
    """Sub-pipelined tensor parallelism runs a micro-batch in two halves, on one version of the weights."""
    unit = 2 * schedule.share_of_samples.denominator
    if parallel.microbatch % unit:
        yield (
            "parallel.microbatch",
            f"{parallel.microbatch} sequences do not divide into halves (sub_pipelined)",
            f"use a multiple of {unit}",
        )
    if schedule.versions != "flush":
        yield (
            "parallel.sub_pipelined",
            f"{schedule.name} keeps several versions of the weights",
            "use a synchronous schedule",
        )
    if parallel.recompute not in ("none", "full"):
        yield "parallel.sub_pipelined", "half batches cannot recompute only some layers", "use recompute: full or none"


def depth(stages: int, devices: int, layers: int | None) -> Iterator[BrokenRule]:
    """Yield an error if there are more stages than layers; None if their number is not known yet."""
    if layers is not None and stages > layers:
        each = f" ({devices} devices with {stages // devices} each)" if stages > devices else ""
        yield (
            "parallel.stages",
            f"{stages} stages{each} for a model of {layers} layer{'s' * (layers > 1)}",
            f"use at most {layers} in all, or a deeper model (model.layers)",
        )


def _branches(model: ModelSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Yield keys without use for a graph of branches, whose stages follow from the model, as uneven as its branches."""
    if isinstance(model, GptSpec):
        yield "parallel.placement", "the built-in GPT is a chain of blocks without branches", "use line"
    for key, fix in (
        ("chunks", "leave it out: a device gets as many stages as its branches need"),
        ("memory_limit", "leave it out: branches' activations differ in size, so that a count of them says nothing"),
        ("unit", "leave it out"),
        ("pipelines", "leave it out"),
        ("concat", "leave it out"),
        ("keep", "leave it out"),
        ("replan", "leave it out"),
        ("tensor", "use tensor: 1"),
        ("sub_pipelined", "leave it out"),
    ):
        if getattr(parallel, key) != type(parallel).model_fields[key].default:
            yield f"parallel.{key}", "placement: branches has no use for it", fix
    if parallel.recompute not in ("none", "full"):
        yield "parallel.recompute", "placement: branches recomputes whole stages or none", "use none or full"


def _keep(parallel: ParallelSpec, placement: Sequence[Sequence[int]]) -> Iterator[BrokenRule]:
    stages = len(placement[0])
    for key in ("keep", "alphas"):
        shares = getattr(parallel, key)
        if isinstance(shares, tuple):
            if len(shares) != stages:
                yield f"parallel.{key}", f"{len(shares)} shares for {stages} stages", "give one per stage"
        elif (
            key == "alphas"
            and parallel.recompute == "stage-aware"
            and (len(placement) > 1 or len(set(placement[0])) < stages)
        ):
            yield (
                "parallel.alphas",
                f"the formula for shares does not cover several stages per device, as in {parallel.schedule}",
                f"give {stages} shares, or use a schedule with one stage per device",
            )


def alphas_rules(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Stage-aware recomputation needs one of ``alphas`` and ``memory_cap_mb``, which limits reverse first-k as well."""
    if parallel.recompute != "stage-aware":
        return
    if parallel.alphas is None and parallel.memory_cap_mb is None:
        why = "missing; stage-aware recomputation needs to know how much memory it may use"
        yield "parallel.memory_cap_mb", why, "add it, or give alphas"
    elif parallel.alphas is not None and parallel.memory_cap_mb is not None and not parallel.postpones:
        yield "parallel.memory_cap_mb", "has no effect if alphas are given", "leave one of them out"


def _why(error: ScheduleError) -> str:
    """The reason, with the place where that is no key of the job: a line of a schedule file, a device."""
    return (
        error.why
        if error.where in (*KEYS, *OPTIONS, "schedule", "placement", "sync")
        else str(error).split("\n  fix:")[0]
    )


def stash(model: ModelSpec, train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with PipeDream, which updates each stage after each micro-batch independently."""
    if parallel.replicas > 1:
        yield (
            "parallel.replicas",
            "pipedream updates after every micro-batch: replicas would drift apart",
            "use replicas: 1, or schedule: pipedream-2bw",
        )
    if train.clip is not None:
        yield (
            "train.clip",
            "pipedream never has the gradients of all stages at once, so there is no global norm",
            "set it to null, or use schedule: pipedream-2bw",
        )
    if train.on_nonfinite == "skip":
        yield (
            "train.on_nonfinite",
            "pipedream never has the gradients of all stages at once, so some would make updates "
            "before another finds such a number",
            "use rewind or stop, or schedule: pipedream-2bw",
        )
    if isinstance(model, GptSpec) and model.tie_embeddings and parallel.stages > 1:
        yield (
            "model.tie_embeddings",
            "pipedream updates first and last stage at different times: copies would differ",
            "set it to false, or use schedule: pipedream-2bw",
        )
