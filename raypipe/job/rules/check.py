"""Rules between the fields of a job, and values that are not available yet; each violation comes with a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.files import is_url
from raypipe.job.data_spec import DataSpec
from raypipe.job.field_types import WIDTH, WireDtype
from raypipe.job.model_spec import CapturedSpec, GptSpec, ModelSpec
from raypipe.job.parallel_spec import BUDGET, INNERMOST, JOBS_OWN, PLANNED, SHAPE, SHARDING, ParallelSpec
from raypipe.job.requested_schedule import checked_schedule, is_file
from raypipe.job.rules.no_effect import Parts, without_effect
from raypipe.job.rules.size_limits import too_large, too_many
from raypipe.job.train_spec import TrainSpec
from raypipe.schedule import SCHEDULES
from raypipe.schedule.passes.sync import BY_BUCKET, BY_LAYER
from raypipe.schedule.shape import OPTIONS
from raypipe.search.placements import placed

if TYPE_CHECKING:
    from raypipe.schedule.ir import Schedule

AVAILABLE: dict[str, tuple[object, ...]] = {
    "recompute": ("none", "full", "stage-aware", *PLANNED),
}
"""Per key of ``parallel``, the available values; others are refused rather than ignored."""


TIMEOUTS_S = (1.0, 7 * 24 * 3600.0)
"""Smallest and largest ``train.message_timeout_s``."""


class BrokenRule(NamedTuple):
    """A broken rule: the key, the reason, and what to do."""

    key: str
    why: str
    fix: str


def problems(
    model: ModelSpec, data: DataSpec, train: TrainSpec, parallel: ParallelSpec, planned: Schedule | None = None
) -> Iterator[BrokenRule]:
    """Yield all broken rules, the most basic first; ``planned``: one copy's step, where a plan has it already."""
    yield from (BrokenRule(*found) for found in too_many(parallel))
    if isinstance(model, GptSpec):
        yield from (BrokenRule(*found) for found in too_large(model, parallel.microbatch))
        yield from _gpt(model, data)
    else:
        yield from _captured(model, data)
    yield from _train(train)
    yield from _available(parallel)
    yield from _wire(train, parallel)
    yield from _sync(train, parallel)
    yield from _side_stream(train, parallel)
    yield from (BrokenRule(*found) for found in without_effect(Parts(model, data, train, parallel)))
    yield from _graphs(train, parallel)
    if train.optimizer == "adafactor":
        for key, wanted in (("shard", "none"), ("tensor", 1)):
            if getattr(parallel, key) != wanted:
                why = f"{getattr(parallel, key)} divides parameters, of which adafactor reads whole rows and columns"
                yield BrokenRule(f"parallel.{key}", why, f"use {key}: {wanted}, or another optimizer")
    if train.on_nonfinite == "rewind" and parallel.transport == "ray-collective":
        why = "rewind sets all workers up again, and ray-collective can be set up only once in a process"
        yield BrokenRule("train.on_nonfinite", why, "use skip or stop, or another transport")
    if parallel.auto:
        yield from _wishes(model, train, parallel)
        return
    yield from _alphas(parallel)
    yield from _slices(train, parallel)
    yield from _tensor(model, parallel)
    yield from _shard(parallel)
    yield from _batch(train, parallel)
    yield from _schedule(model, train, parallel, planned)


def _gpt(model: GptSpec, data: DataSpec) -> Iterator[BrokenRule]:
    if data.type == "arrays":
        yield BrokenRule("data.type", f"the built-in GPT reads bytes, not {data.type}", "use bytes, or another model")
    if model.vocabulary < 256 and data.type != "documents":
        yield BrokenRule("model.vocabulary", f"{model.vocabulary}, but bytes take 256 values", "use 256")
    if model.positions is not None and model.positions < model.sequence:
        yield BrokenRule(
            "model.positions",
            f"{model.positions} for sequences of {model.sequence}",
            f"use {model.sequence} or more, or leave it out",
        )
    if model.hidden % model.heads:
        low, high = neighbours(model.hidden, model.heads)
        yield BrokenRule(
            "model.hidden",
            f"{model.hidden} is not divisible by heads = {model.heads}",
            f"use {_either(low, high)}, or another number of heads",
        )


def _captured(model: CapturedSpec, data: DataSpec) -> Iterator[BrokenRule]:
    if data.type != "arrays":
        if model.sequence is None:
            what = "a sample holds" if data.type == "bytes" else "the longest line may have"
            yield BrokenRule("model.sequence", f"missing: how many bytes {what}", "add it, for example 128")
        if model.task in ("classification", "regression"):
            yield BrokenRule(
                "model.task", f"{model.task} needs labels, bytes have none", "use data: {type: arrays, ...}"
            )


def _rates(train: TrainSpec) -> Iterator[BrokenRule]:
    if train.lr_table is None:
        return
    if len(train.lr_table) != train.steps:
        why = f"has {len(train.lr_table)} learning rates, but the run has {train.steps} steps"
        yield BrokenRule("train.lr_table", why, "give one for each step")


def _train(train: TrainSpec) -> Iterator[BrokenRule]:
    if train.min_lr > train.lr:
        yield BrokenRule("train.min_lr", f"{train.min_lr} is above lr = {train.lr}", "lower min_lr or raise lr")
    yield from _rates(train)
    shortest, longest = TIMEOUTS_S
    if not shortest <= train.message_timeout_s <= longest:
        early = train.message_timeout_s < shortest
        yield BrokenRule(
            "train.message_timeout_s",
            f"{train.message_timeout_s:g} s: "
            + ("messages take longer on a busy machine" if early else "a hanging stage would not be detected"),
            f"use {shortest if early else longest:g}" + (" or more" if early else ", a week, or less"),
        )
    if train.checkpoint_storage is not None and not is_url(train.checkpoint_storage):
        yield BrokenRule(
            "train.checkpoint_storage",
            f"{train.checkpoint_storage} is not a URI",
            "write it with its scheme, such as s3://bucket/run or file:///mnt/runs/first",
        )
    if train.profile is not None and train.profile.start_step > train.steps:
        why = f"{train.profile.start_step}, but the run has {train.steps} steps"
        yield BrokenRule("train.profile.start_step", why, f"use {train.steps} or less")
    if train.keeps_best and not train.eval_every:
        key = "early_stop" if train.early_stop is not None else "load_best_at_end"
        yield BrokenRule(f"train.{key}", "there is no validation before the end of the run", "set train.eval_every")


def _wire(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    wire, crossing = parallel.wire_dtype, train.crossing_dtype
    keeps = train.dtype == "bfloat16" and wire == crossing  # instead of the default, bfloat16
    if wire is not None and WIDTH[wire] >= WIDTH[crossing] and not keeps:
        narrower = " or ".join(name for name in get_args(WireDtype) if WIDTH[name] < WIDTH[crossing])
        yield BrokenRule(
            "parallel.wire_dtype",
            f"{wire} is not narrower than the {crossing} that stages exchange",
            f"use {narrower}, or leave it out" if narrower else "leave it out",
        )


def _available(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    for key, values in AVAILABLE.items():
        value = getattr(parallel, key)
        if value not in values and not isinstance(value, tuple):
            allowed = " or ".join("null" if v is None else str(v) for v in values)
            yield BrokenRule(f"parallel.{key}", f"{value} is not available yet", f"use {allowed}, or leave the key out")


def _sync(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with a way to synchronise."""
    sync, key, instead = parallel.sync, "parallel.sync", "use sync: wait-free, or"
    if parallel.auto:
        if sync in BY_BUCKET and "sync" in parallel.given:
            yield BrokenRule(
                key,
                f"{sync} cannot be given if the planner chooses the plan",
                "use lazy, eager or eager-opt, or give schedule, stages and microbatch",
            )
        return
    if sync not in BY_LAYER:
        return
    if train.clip is not None:
        why = f"{sync} updates each layer when its own sum is in, and clipping needs the norm of all gradients first"
        yield BrokenRule(key, why, f"{instead} set train.clip to null")
    if train.on_nonfinite == "skip":
        why = f"{sync} updates each layer when its own sum is in, before another device may find such a number"
        yield BrokenRule("train.on_nonfinite", why, "use rewind or stop, or sync: wait-free")
    if parallel.shard != "none":
        yield BrokenRule(key, f"{sync} cannot be combined with shard: {parallel.shard}", f"{instead} shard: none")
    if parallel.tensor > 1:
        yield BrokenRule(key, f"{sync} cannot be combined with tensor: {parallel.tensor}", f"{instead} tensor: 1")
    if parallel.replans:
        why = f"with {sync}, tasks wait for sums, so no order is chosen by their times while the job runs"
        yield BrokenRule(key, why, f"{instead} replan: false")


def _side_stream(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with a second stream."""
    held, key = parallel.side_stream, "parallel.side_stream"
    if held is None:
        return
    if parallel.auto:
        fix = "leave it out; raypipe regions makes a plan with it, for raypipe train --plan"
        yield BrokenRule(key, "cannot be given if the planner chooses the plan", fix)
        return
    if parallel.devices > 1:
        yield BrokenRule(key, f"is for one device, and the job has {parallel.devices}", "use stages: 1, replicas: 1")
    if parallel.sync != "lazy":
        yield BrokenRule(key, f"one device sums nothing, so sync: {parallel.sync} says nothing", "leave sync out")
    if train.clip is not None:
        why = "each layer is updated when its own gradient is in, and clipping needs the norm of all gradients first"
        yield BrokenRule(key, why, "set train.clip to null, or leave it out")
    if train.on_nonfinite == "skip":
        why = "with parallel.side_stream, each layer is updated before another may find such a number"
        yield BrokenRule("train.on_nonfinite", why, "use rewind or stop")
    if parallel.replans:
        why = "with a second stream, no order is chosen by measured times while the job runs"
        yield BrokenRule(key, why, "use replan: false")
    wrong = next(((late, at) for late, at in held.items() if not at <= late < parallel.chunks or not late), None)
    if wrong is not None:
        late, at = wrong
        yield BrokenRule(
            key,
            f"stage {late} beside the forward of stage {at}, of {parallel.chunks}",
            "name stages from 1, each with itself or an earlier one",
        )


def _graphs(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with CUDA graphs; ``auto`` captures nothing where one of them stands."""
    wanted, key = train.cuda_graphs, "train.cuda_graphs"
    if wanted == "tasks":
        if train.compile == "none":
            yield BrokenRule(
                key, "tasks captures compiled stages, and compile is none", "set train.compile to inductor"
            )
        if parallel.shard != "none":
            why = f"shard: {parallel.shard} moves gradients or weights in memory, and graphs read fixed addresses"
            yield BrokenRule(key, why, "use none, or shard: none")
    if wanted == "step" and (parallel.auto or parallel.devices > 1):
        fix = "use tasks with train.compile: inductor, or one device with schedule, stages: 1 and microbatch given"
        have = "the planner chooses the devices" if parallel.auto else f"the job has {parallel.devices} devices"
        yield BrokenRule(key, f"step is for one device without a pipeline, and {have}", fix)
    elif wanted == "step" and parallel.side_stream:
        why = "the graph of a step ends with it, and parallel.side_stream holds weight gradients back for the next one"
        yield BrokenRule(key, why, "use parallel.side_stream: {}, or none")


def _tensor(model: ModelSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with tensor parallelism."""
    if parallel.tensor == 1:
        return
    if getattr(model, "loss", "task") != "task":
        why = "a loss other than the task's cannot be divided over tensor ranks"
        yield BrokenRule("model.loss", why, "use tensor: 1, or loss: task")
    if getattr(model, "lora", None) is not None:
        yield BrokenRule("model.lora", f"cannot be combined with tensor: {parallel.tensor}", "use tensor: 1")
    if parallel.update == "optimistic":
        why = f"optimistic cannot be combined with tensor: {parallel.tensor}"
        yield BrokenRule("parallel.update", why, "use auto, which then waits")


WISHES = {*SHAPE, *SHARDING, *JOBS_OWN, INNERMOST, BUDGET, "sync", "recompute", "tensor_table"}
"""Keys that may be given beside ``auto: true``: the planner chooses among plans that have them."""


def _shard(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with sharded data parallelism."""
    if parallel.shard == "none":
        return
    if parallel.tensor > 1:
        why = f"{parallel.shard} cannot be combined with tensor: {parallel.tensor}"
        yield BrokenRule("parallel.shard", why, "use shard: none, or tensor: 1")
    if parallel.update == "optimistic":
        why = f"optimistic cannot be combined with shard: {parallel.shard}"
        yield BrokenRule("parallel.update", why, "use auto, which then waits")
    if parallel.replans:
        why = f"the order of a run with shard: {parallel.shard} does not change while it runs"
        yield BrokenRule("parallel.replan", why, "use replan: false")
    if parallel.shard_replicas == 1:
        yield BrokenRule("parallel.shard_replicas", "one replica divides nothing", "use 2 or more, or shard: none")
    chosen = parallel.auto and "replicas" not in parallel.given
    if parallel.shard_replicas is not None and not chosen and parallel.replicas % parallel.shard_replicas:
        why = f"{parallel.replicas} replicas are not a multiple of {parallel.shard_replicas}"
        yield BrokenRule("parallel.shard_replicas", why, f"use a divisor of {parallel.replicas}, or leave it out")


def _wishes(model: ModelSpec, train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    for key in parallel.given:
        if key not in WISHES and key not in AVAILABLE:
            yield BrokenRule(
                f"parallel.{key}",
                "cannot be given if the planner chooses the plan",
                "leave it out, or give schedule, stages and microbatch",
            )
    if "shard" in parallel.given:
        yield from _shard(parallel)
    yield from _slices(train, parallel)
    if parallel.recompute not in ("none", "full", *PLANNED):
        what = "stage-aware" if isinstance(parallel.recompute, str) else "a list of layers"
        yield BrokenRule(
            "parallel.recompute",
            f"{what} depends on the cut, which the planner chooses",
            "use none, full, layers, microbatches or auto (of these the planner decides how much), or give schedule, "
            "stages and microbatch",
        )
    if "schedule" in parallel.given and parallel.schedule not in (*SCHEDULES, "auto"):
        fix = "give stages and microbatch too" if is_file(parallel.schedule) else nearest(parallel.schedule, SCHEDULES)
        yield BrokenRule("parallel.schedule", f'"{parallel.schedule}" is unknown to the planner', fix)
    yield from _batch(train, parallel)
    if isinstance(model, GptSpec):
        yield from _depth(parallel.stages * parallel.chunks, parallel.stages, model.layers)


KEYS = {"devices": "stages", "microbatches": "microbatch"}
"""Names in errors about a shape -> the corresponding keys of ``parallel``."""


def _schedule(
    model: ModelSpec, train: TrainSpec, parallel: ParallelSpec, planned: Schedule | None
) -> Iterator[BrokenRule]:
    """Errors of the schedule: an unknown name, an impossible shape, or an option that it does not have."""
    # The number of a captured model's layers is only known after capturing it.
    layers = model.layers if isinstance(model, GptSpec) else None
    if parallel.placement != "line" and parallel.schedule != "auto":
        why = f"{parallel.schedule} has a fixed placement"
        yield BrokenRule("parallel.placement", why, "leave it out, or use schedule: auto")
    try:
        if parallel.schedule == "auto":
            if parallel.placement == "free":  # a plan's order says which
                return
            if parallel.placement == "branches":
                yield from _branches(model, parallel)
                return
            placement = placed(parallel.placement, parallel.shape(train.batch))
            yield from _depth(len(placement[0]), parallel.stages, layers)
            yield from _keep(parallel, placement)
            return
        schedule = planned or checked_schedule(parallel, train.batch)
    except ScheduleError as error:
        key = KEYS.get(error.where, error.where)
        yield BrokenRule(
            f"parallel.{key if key in type(parallel).model_fields else 'schedule'}", _why(error), error.fix
        )
        return
    yield from _depth(schedule.stages, parallel.stages, layers)
    yield from _keep(parallel, schedule.placement)
    if parallel.memory_cap_mb is not None and schedule.versions != "flush":
        yield BrokenRule(
            "parallel.memory_cap_mb",
            f"{parallel.schedule} never flushes, so shares cannot change between steps",
            "give alphas, or use a synchronous schedule",
        )
    if parallel.replan and schedule.versions != "flush":
        yield BrokenRule(
            "parallel.replan",
            f"{parallel.schedule} never flushes, so plans cannot change between steps",
            "leave it out, or use a synchronous schedule",
        )
    if parallel.microbatch % (parts := schedule.share_of_samples.denominator):
        yield BrokenRule(
            "parallel.microbatch",
            f"{parallel.microbatch} sequences do not divide into {parts} halves",
            f"use a multiple of {parts}",
        )
    if parallel.sub_pipelined:
        yield from _halves(parallel, schedule)
    if schedule.versions != "flush" and parallel.sync in BY_LAYER:
        why = f"{parallel.sync} needs a synchronous schedule, and {parallel.schedule} never flushes"
        yield BrokenRule("parallel.sync", why, "use sync: lazy")
    if schedule.versions != "flush" and train.cuda_graphs in ("tasks", "step"):
        why = f"{parallel.schedule} keeps several versions of the weights, and graphs read fixed addresses"
        yield BrokenRule("train.cuda_graphs", why, "use none, or another schedule")
    if schedule.versions != "flush" and parallel.side_stream is not None:
        why = f"a second stream needs a synchronous schedule, and {parallel.schedule} never flushes"
        yield BrokenRule("parallel.side_stream", why, "leave it out, or use another schedule")
    if schedule.versions == "stash":
        yield from stash(model, train, parallel)


def _slices(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with slices along the sequence."""
    if parallel.slices == 1:
        return
    fix = "use slices: 1, or"
    if parallel.recompute not in ("none", "full") or parallel.keep is not None:
        why = "a stage in slices recomputes all of its activations or none"
        yield BrokenRule("parallel.slices", why, f"{fix} recompute: full or none, without keep")
    if parallel.tensor > 1:
        yield BrokenRule("parallel.slices", f"cannot be combined with tensor: {parallel.tensor}", f"{fix} tensor: 1")
    if train.compile != "none":
        why = f"compiled stages (compile: {train.compile}) run whole micro-batches"
        yield BrokenRule("parallel.slices", why, f"{fix} train.compile: none")
    if parallel.late_updates:
        key = "side_stream" if parallel.side_stream is not None else f"sync: {parallel.sync}"
        yield BrokenRule("parallel.slices", f"cannot be combined with {key}", f"{fix} leave that out")


def _halves(parallel: ParallelSpec, schedule: Schedule) -> Iterator[BrokenRule]:
    """Sub-pipelined tensor parallelism runs a micro-batch in two halves, on one version of the weights."""
    unit = 2 * schedule.share_of_samples.denominator
    if parallel.microbatch % unit:
        yield BrokenRule(
            "parallel.microbatch",
            f"{parallel.microbatch} sequences do not divide into halves (sub_pipelined)",
            f"use a multiple of {unit}",
        )
    if schedule.versions != "flush":
        yield BrokenRule(
            "parallel.sub_pipelined",
            f"{schedule.name} keeps several versions of the weights",
            "use a synchronous schedule",
        )
    if parallel.recompute not in ("none", "full"):
        yield BrokenRule(
            "parallel.sub_pipelined", "half batches cannot recompute only some layers", "use recompute: full or none"
        )


def _depth(stages: int, devices: int, layers: int | None) -> Iterator[BrokenRule]:
    if layers is not None and stages > layers:
        each = f" ({devices} devices with {stages // devices} each)" if stages > devices else ""
        yield BrokenRule(
            "parallel.stages",
            f"{stages} stages{each} for a model of {layers} layer{'s' * (layers > 1)}",
            f"use at most {layers} in all, or a deeper model (model.layers)",
        )


def _branches(model: ModelSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Yield keys without use for a graph of branches, whose stages follow from the model, as uneven as its branches."""
    if isinstance(model, GptSpec):
        yield BrokenRule("parallel.placement", "the built-in GPT is a chain of blocks without branches", "use line")
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
            yield BrokenRule(f"parallel.{key}", "placement: branches has no use for it", fix)
    if parallel.recompute not in ("none", "full"):
        yield BrokenRule(
            "parallel.recompute", "placement: branches recomputes whole stages or none", "use none or full"
        )
    if parallel.shard != "none":
        yield BrokenRule("parallel.shard", "placement: branches keeps whole stages on every replica", "use shard: none")


def _keep(parallel: ParallelSpec, placement: Sequence[Sequence[int]]) -> Iterator[BrokenRule]:
    stages = len(placement[0])
    for key in ("keep", "alphas"):
        shares = getattr(parallel, key)
        if isinstance(shares, tuple):
            if len(shares) != stages:
                yield BrokenRule(f"parallel.{key}", f"{len(shares)} shares for {stages} stages", "give one per stage")
        elif (
            key == "alphas"
            and parallel.recompute == "stage-aware"
            and (len(placement) > 1 or len(set(placement[0])) < stages)
        ):
            yield BrokenRule(
                "parallel.alphas",
                f"the formula for shares does not cover several stages per device, as in {parallel.schedule}",
                f"give {stages} shares, or use a schedule with one stage per device",
            )


def _alphas(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Stage-aware recomputation needs one of ``alphas`` and ``memory_cap_mb``, which limits reverse first-k as well."""
    if parallel.recompute != "stage-aware":
        return
    if parallel.alphas is None and parallel.memory_cap_mb is None:
        why = "missing; stage-aware recomputation needs to know how much memory it may use"
        yield BrokenRule("parallel.memory_cap_mb", why, "add it, or give alphas")
    elif parallel.alphas is not None and parallel.memory_cap_mb is not None and not parallel.postpones:
        yield BrokenRule("parallel.memory_cap_mb", "has no effect if alphas are given", "leave one of them out")


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
        yield BrokenRule(
            "parallel.replicas",
            "pipedream updates after every micro-batch: replicas would drift apart",
            "use replicas: 1, or schedule: pipedream-2bw",
        )
    if train.clip is not None:
        yield BrokenRule(
            "train.clip",
            "pipedream never has the gradients of all stages at once, so there is no global norm",
            "set it to null, or use schedule: pipedream-2bw",
        )
    if train.on_nonfinite == "skip":
        yield BrokenRule(
            "train.on_nonfinite",
            "pipedream never has the gradients of all stages at once, so some would make updates "
            "before another finds such a number",
            "use rewind or stop, or schedule: pipedream-2bw",
        )
    if isinstance(model, GptSpec) and model.tie_embeddings and parallel.stages > 1:
        yield BrokenRule(
            "model.tie_embeddings",
            "pipedream updates first and last stage at different times: copies would differ",
            "set it to false, or use schedule: pipedream-2bw",
        )


def _batch(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    batch = train.batch
    unit = parallel.microbatch * parallel.replicas
    if batch % unit:
        low, high = neighbours(batch, unit)
        yield BrokenRule(
            "train.batch",
            f"{batch} is not divisible by microbatch = {parallel.microbatch} times replicas = {parallel.replicas}",
            f"use {_either(low, high)}, or another microbatch",
        )


def neighbours(value: int, unit: int) -> tuple[int, int]:
    """Return the multiples of ``unit`` below and above ``value``; the one below may be 0.

    >>> neighbours(30, 8)
    (24, 32)
    """
    low = value // unit * unit
    return low, low + unit


def _either(low: int, high: int) -> str:
    return f"{low} or {high}" if low else str(high)
