"""Rules between the fields of a job; each violation comes with a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, isqrt
from typing import TYPE_CHECKING, get_args

from raypipe.errors import nearest
from raypipe.files import is_url
from raypipe.job.data_spec import DataSpec
from raypipe.job.field_types import MOST_DEVICES, WIDTH, WireDtype
from raypipe.job.model_spec import CapturedSpec, GptSpec, HfSpec, ModelSpec
from raypipe.job.parallel_spec import BUDGET, INNERMOST, JOBS_OWN, PLANNED, SEQUENCE_KEY, SHAPE, SHARDING, ParallelSpec
from raypipe.job.requested_schedule import is_file
from raypipe.job.rules.no_effect import BrokenRule, Parts, without_effect
from raypipe.job.rules.schedule import alphas_rules, depth, schedule_rules
from raypipe.job.train_spec import TrainSpec, rows_needed
from raypipe.schedule import SCHEDULES
from raypipe.schedule.passes.sync import BY_BUCKET, BY_LAYER

if TYPE_CHECKING:
    from raypipe.schedule.ir import Schedule

TIMEOUTS_S = (1.0, 7 * 24 * 3600.0)
"""Smallest and largest ``train.message_timeout_s``."""


def problems(
    model: ModelSpec, data: DataSpec, train: TrainSpec, parallel: ParallelSpec, planned: Schedule | None = None
) -> Iterator[BrokenRule]:
    """Yield all broken rules, the most basic first; ``planned``: one copy's step, where a plan has it already."""
    yield from too_many(parallel)
    if isinstance(model, GptSpec):
        yield from too_large(model, parallel.microbatch)
        yield from _gpt(model, data)
    else:
        yield from _captured(model, data)
    yield from _train(train)
    yield from _wire(train, parallel)
    yield from _sync(train, parallel)
    yield from _side_stream(train, parallel)
    yield from without_effect(Parts(model, data, train, parallel))
    yield from _packed(model, train, parallel)
    yield from _graphs(train, parallel)
    yield from _experts(model, train, parallel)
    yield from _context(train, parallel)
    yield from vocabulary_rules(train, parallel)
    if train.loss_chunk_tokens is not None and train.compile != "none":
        why = f"compiled stages (compile: {train.compile}) keep their logits whole"
        yield "train.loss_chunk_tokens", why, "leave it out, or use compile: none"
    if train.updates_whole:
        for key, wanted in (
            ("tensor", 1),
            *([("vocabulary", "whole"), ("shard", "none")] if train.updates_alone else []),
        ):
            if getattr(parallel, key) != wanted:
                divides = f"{getattr(parallel, key)} divides parameters"
                why = f"{divides}, of which {train.optimizer} reads whole rows and columns"
                yield f"parallel.{key}", why, f"use {key}: {wanted}, or another optimizer"
    if train.on_nonfinite == "rewind" and parallel.transport == "ray-collective":
        why = "rewind sets all workers up again, and ray-collective can be set up only once in a process"
        yield "train.on_nonfinite", why, "use skip or stop, or another transport"
    if parallel.auto:
        yield from _wishes(model, train, parallel)
        return
    yield from alphas_rules(parallel)
    yield from _slices(train, parallel)
    yield from _tensor(model, parallel)
    yield from _shard(parallel)
    yield from _batch(train, parallel)
    yield from schedule_rules(model, train, parallel, planned)


def _gpt(model: GptSpec, data: DataSpec) -> Iterator[BrokenRule]:
    if data.type == "arrays":
        yield "data.type", f"the built-in GPT reads bytes, not {data.type}", "use bytes, or another model"
    if model.vocabulary < 256 and data.type != "documents":
        yield "model.vocabulary", f"{model.vocabulary}, but bytes take 256 values", "use 256"
    if model.positions is not None and model.positions < model.sequence:
        yield (
            "model.positions",
            f"{model.positions} for sequences of {model.sequence}",
            f"use {model.sequence} or more, or leave it out",
        )
    if model.hidden % model.heads:
        low, high = neighbours(model.hidden, model.heads)
        yield (
            "model.hidden",
            f"{model.hidden} is not divisible by heads = {model.heads}",
            f"use {_either(low, high)}, or another number of heads",
        )


def _captured(model: CapturedSpec, data: DataSpec) -> Iterator[BrokenRule]:
    if data.type != "arrays":
        if model.sequence is None:
            what = "a sample holds" if data.type == "bytes" else "the longest line may have"
            yield "model.sequence", f"missing: how many bytes {what}", "add it, for example 128"
        if model.task in ("classification", "regression"):
            yield "model.task", f"{model.task} needs labels, bytes have none", "use data: {type: arrays, ...}"


def _train(train: TrainSpec) -> Iterator[BrokenRule]:
    if train.min_lr > train.lr:
        yield "train.min_lr", f"{train.min_lr} is above lr = {train.lr}", "lower min_lr or raise lr"
    if train.lr_table is not None and len(train.lr_table) != train.steps:
        why = f"has {len(train.lr_table)} learning rates, but the run has {train.steps} steps"
        yield "train.lr_table", why, "give one for each step"
    shortest, longest = TIMEOUTS_S
    if not shortest <= train.message_timeout_s <= longest:
        early = train.message_timeout_s < shortest
        yield (
            "train.message_timeout_s",
            f"{train.message_timeout_s:g} s: "
            + ("messages take longer on a busy machine" if early else "a hanging stage would not be detected"),
            f"use {shortest if early else longest:g}" + (" or more" if early else ", a week, or less"),
        )
    if train.checkpoint_storage is not None and not is_url(train.checkpoint_storage):
        yield (
            "train.checkpoint_storage",
            f"{train.checkpoint_storage} is not a URI",
            "write it with its scheme, such as s3://bucket/run or file:///mnt/runs/first",
        )
    if train.profile is not None and train.profile.start_step > train.steps:
        why = f"{train.profile.start_step}, but the run has {train.steps} steps"
        yield "train.profile.start_step", why, f"use {train.steps} or less"
    if train.keeps_best and not train.eval_every:
        key = "early_stop" if train.early_stop is not None else "load_best_at_end"
        yield f"train.{key}", "there is no validation before the end of the run", "set train.eval_every"


def _wire(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    wire, crossing = parallel.wire_dtype, train.crossing_dtype
    keeps = train.dtype == "bfloat16" and wire == crossing  # instead of the default, bfloat16
    if wire is not None and WIDTH[wire] >= WIDTH[crossing] and not keeps:
        narrower = " or ".join(name for name in get_args(WireDtype) if WIDTH[name] < WIDTH[crossing])
        yield (
            "parallel.wire_dtype",
            f"{wire} is not narrower than the {crossing} that stages exchange",
            f"use {narrower}, or leave it out" if narrower else "leave it out",
        )


def _sync(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with a way to synchronise."""
    sync, key, instead = parallel.sync, "parallel.sync", "use sync: wait-free, or"
    if parallel.auto:
        if sync in BY_BUCKET and "sync" in parallel.given:
            yield (
                key,
                f"{sync} cannot be given if the planner chooses the plan",
                "use lazy, eager or eager-opt, or give schedule, stages and microbatch",
            )
        return
    if sync not in BY_LAYER:
        return
    if train.clip is not None:
        why = f"{sync} updates each layer when its own sum is in, and clipping needs the norm of all gradients first"
        yield key, why, f"{instead} set train.clip to null"
    if train.on_nonfinite == "skip":
        why = f"{sync} updates each layer when its own sum is in, before another device may find such a number"
        yield "train.on_nonfinite", why, "use rewind or stop, or sync: wait-free"
    if parallel.shard != "none":
        yield key, f"{sync} cannot be combined with shard: {parallel.shard}", f"{instead} shard: none"
    if parallel.tensor > 1:
        yield key, f"{sync} cannot be combined with tensor: {parallel.tensor}", f"{instead} tensor: 1"
    if parallel.replans:
        why = f"with {sync}, tasks wait for sums, so no order is chosen by their times while the job runs"
        yield key, why, f"{instead} replan: false"


def _side_stream(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with a second stream."""
    held, key = parallel.side_stream, "parallel.side_stream"
    if held is None:
        return
    if parallel.auto:
        fix = "leave it out; raypipe regions makes a plan with it, for raypipe train --plan"
        yield key, "cannot be given if the planner chooses the plan", fix
        return
    if parallel.devices > 1:
        yield key, f"is for one device, and the job has {parallel.devices}", "use stages: 1, replicas: 1"
    if parallel.sync != "lazy":
        yield key, f"one device sums nothing, so sync: {parallel.sync} says nothing", "leave sync out"
    if train.clip is not None:
        why = "each layer is updated when its own gradient is in, and clipping needs the norm of all gradients first"
        yield key, why, "set train.clip to null, or leave it out"
    if train.on_nonfinite == "skip":
        why = "with parallel.side_stream, each layer is updated before another may find such a number"
        yield "train.on_nonfinite", why, "use rewind or stop"
    if parallel.replans:
        why = "with a second stream, no order is chosen by measured times while the job runs"
        yield key, why, "use replan: false"
    wrong = next(((late, at) for late, at in held.items() if not at <= late < parallel.chunks or not late), None)
    if wrong is not None:
        late, at = wrong
        yield (
            key,
            f"stage {late} beside the forward of stage {at}, of {parallel.chunks}",
            "name stages from 1, each with itself or an earlier one",
        )


def _packed(model: ModelSpec, train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with packed documents."""
    tokens, row = train.tokens_per_step, train.microbatch_tokens
    if tokens is None or row == "auto":
        return
    if row > tokens:
        yield "train.microbatch_tokens", f"{row}, but a step has {tokens} tokens", f"use {tokens} or less"
    elif train.batch < (least := rows_needed(tokens, row)):
        why = f"{train.batch} rows of {row} tokens may not hold the documents of a step, up to {tokens} tokens"
        yield "train.batch", why, f"leave it out, use {least} or more, or raise train.microbatch_tokens"
    if row % (chunks := 2 * parallel.context if parallel.context > 1 else 1):
        why = (
            f"rows of {row} tokens do not divide into {chunks} equal chunks, two for each of {parallel.context} copies"
        )
        yield "train.microbatch_tokens", why, f"use {_either(*neighbours(row, chunks))}"
    if not isinstance(model, HfSpec):
        fix = "leave it out, or use a model of Hugging Face (model.hf)"
        yield "train.tokens_per_step", "needs a model whose attention keeps the documents of a row apart", fix
    if train.metrics is not None:
        why = "a function for figures gets rows of the data, and with train.tokens_per_step rows hold several of them"
        yield "train.metrics", why, "leave it out, or set tokens_per_step to null"
    if parallel.slices > 1:
        why = "rows of packed documents differ in length, and slices are of one length"
        yield "parallel.slices", why, "use slices: 1, or set train.tokens_per_step to null"


def _graphs(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with CUDA graphs; ``auto`` captures nothing where one of them stands."""
    wanted, key = train.cuda_graphs, "train.cuda_graphs"
    if wanted == "tasks":
        if train.compile == "none":
            yield key, "tasks captures compiled stages, and compile is none", "set train.compile to inductor"
        if parallel.shard != "none":
            why = f"shard: {parallel.shard} moves gradients or weights in memory, and graphs read fixed addresses"
            yield key, why, "use none, or shard: none"
    if wanted == "step" and (parallel.auto or parallel.devices > 1):
        fix = "use tasks with train.compile: inductor, or one device with schedule, stages: 1 and microbatch given"
        have = "the planner chooses the devices" if parallel.auto else f"the job has {parallel.devices} devices"
        yield key, f"step is for one device without a pipeline, and {have}", fix
    elif wanted == "step" and parallel.side_stream:
        why = "the graph of a step ends with it, and parallel.side_stream holds weight gradients back for the next one"
        yield key, why, "use parallel.side_stream: {}, or none"


def _tensor(model: ModelSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with tensor parallelism."""
    if parallel.tensor == 1:
        return
    if getattr(model, "loss", "task") != "task":
        why = "a loss other than the task's cannot be divided over tensor ranks"
        yield "model.loss", why, "use tensor: 1, or loss: task"
    if getattr(model, "lora", None) is not None:
        yield "model.lora", f"cannot be combined with tensor: {parallel.tensor}", "use tensor: 1"
    if parallel.update == "optimistic":
        why = f"optimistic cannot be combined with tensor: {parallel.tensor}"
        yield "parallel.update", why, "use auto, which then waits"


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations of transformers have for the number of experts of a layer."""


def _experts(model: ModelSpec, train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with experts that copies divide."""
    size, key = parallel.experts, "parallel.experts"
    if size == 1:
        return
    config = model.config if isinstance(model, HfSpec) else {}
    counts = [count for name in COUNTS if isinstance(count := config.get(name), int)]
    # Where no count is given, the model has experts for this size, as far as can be known here.
    yield from _divided_by_copies("experts", parallel, counts or [size])
    if train.cuda_graphs != "none":
        why = f"a graph has fixed sizes, and with experts: {size} the tokens of a copy's experts change"
        yield "train.cuda_graphs", why, "use none, or experts: 1"
    if train.updates_alone:
        why = f"experts: {size} divides parameters, of which {train.optimizer} reads whole rows and columns"
        yield key, why, "use experts: 1, or another optimizer"


def _divided_by_copies(name: str, parallel: ParallelSpec, counts: Sequence[int] = ()) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with what consecutive copies divide, ``experts`` or ``context``; so many copies have
    to divide ``counts``, too."""
    size, copies = getattr(parallel, name), parallel.replicas
    chosen = parallel.auto and "replicas" not in parallel.given
    if not chosen and copies % size:
        common = gcd(copies, *counts)
        fits = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: (abs(n - size), n))
        why = f"{copies} replicas are not a multiple of {size}"
        more = "" if any(n % size for n in counts) else f", or replicas: {-(-copies // size) * size}"
        yield f"parallel.{name}", why, f"use {name}: {fits}{more}"
    if parallel.update == "optimistic":
        yield "parallel.update", f"optimistic cannot be combined with {name}: {size}", "use auto, which then waits"
    if parallel.late_updates:
        what = "side_stream" if parallel.side_stream is not None else "sync"
        why = f"makes updates while the next step runs, which cannot be combined with {name}: {size}"
        yield f"parallel.{what}", why, f"leave {what} out, or use {name}: 1"
    if parallel.sub_pipelined:
        yield "parallel.sub_pipelined", f"cannot be combined with {name}: {size}", f"use false, or {name}: 1"


def _context(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with sequences that copies divide."""
    size, key = parallel.context, "parallel.context"
    if size == 1:
        return
    yield from _divided_by_copies("context", parallel)
    if parallel.sequence_parallel:
        why = f"cannot be combined with context: {size}, which divides positions already"
        yield SEQUENCE_KEY, why, "use false, or context: 1"
    if parallel.slices > 1:
        yield key, f"{size} cannot be combined with slices: {parallel.slices}", "use context: 1, or slices: 1"
    if train.compile != "none":
        why = f"compiled stages (compile: {train.compile}) run whole sequences"
        yield key, why, "use context: 1, or train.compile: none"
    if train.cuda_graphs != "none":
        why = f"a graph has no waits for other copies, which context: {size} needs in each attention"
        yield "train.cuda_graphs", why, "use none, or context: 1"


def vocabulary_rules(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with a head whose rows the devices divide."""
    if parallel.vocabulary == "whole":
        return
    for key, wanted in (
        ("tensor", 1),
        ("keep", None),
        ("side_stream", None),
        ("replan", None),
    ):
        if getattr(parallel, key) != wanted:
            yield f"parallel.{key}", "cannot be combined with vocabulary: split", _use(key, wanted)
    if parallel.sync in BY_LAYER:
        yield "parallel.sync", f"{parallel.sync} cannot be combined with vocabulary: split", "use lazy or eager"
    if parallel.recompute == "stage-aware":
        why = "stage-aware is for a chain of stages, and vocabulary: split adds others"
        yield "parallel.recompute", why, "use none, full, or a list of layers"
    if train.compile != "none":
        yield "train.compile", f"{train.compile} runs whole logits, and vocabulary is split", "use none"
    if train.metrics is not None:
        why = "a function for figures gets predictions, which are all logits, and vocabulary is split"
        yield "train.metrics", why, "leave it out, or use vocabulary: whole"


def _use(key: str, wanted: object) -> str:
    return "leave it out" if wanted is None else f"use {key}: {wanted}"


_OTHERS = ("sync", "recompute", "tensor_table", "experts", "expert_order")
WISHES = {*SHAPE, *SHARDING, *JOBS_OWN, INNERMOST, BUDGET, *_OTHERS}
"""Keys that may be given beside ``auto: true``: the planner chooses among plans that have them."""


def _shard(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with sharded data parallelism."""
    if parallel.shard == "none":
        return
    if parallel.update == "optimistic":
        why = f"optimistic cannot be combined with shard: {parallel.shard}"
        yield "parallel.update", why, "use auto, which then waits"
    if parallel.replans:
        why = f"the order of a run with shard: {parallel.shard} does not change while it runs"
        yield "parallel.replan", why, "use replan: false"
    if parallel.shard_replicas == 1:
        yield "parallel.shard_replicas", "one replica divides nothing", "use 2 or more, or shard: none"
    chosen = parallel.auto and "replicas" not in parallel.given
    if parallel.shard_replicas is not None and not chosen and parallel.replicas % parallel.shard_replicas:
        why = f"{parallel.replicas} replicas are not a multiple of {parallel.shard_replicas}"
        yield "parallel.shard_replicas", why, f"use a divisor of {parallel.replicas}, or leave it out"


def _wishes(model: ModelSpec, train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    for key in parallel.given:
        if key not in WISHES:
            yield (
                f"parallel.{key}",
                "cannot be given if the planner chooses the plan",
                "leave it out, or give schedule, stages and microbatch",
            )
    if "shard" in parallel.given:
        yield from _shard(parallel)
    yield from _slices(train, parallel)
    if parallel.recompute not in ("none", "full", *PLANNED):
        what = "stage-aware" if isinstance(parallel.recompute, str) else "a list of layers"
        yield (
            "parallel.recompute",
            f"{what} depends on the cut, which the planner chooses",
            "use none, full, layers, microbatches or auto (of these the planner decides how much), or give schedule, "
            "stages and microbatch",
        )
    if "schedule" in parallel.given and parallel.schedule not in (*SCHEDULES, "auto"):
        fix = "give stages and microbatch too" if is_file(parallel.schedule) else nearest(parallel.schedule, SCHEDULES)
        yield "parallel.schedule", f'"{parallel.schedule}" is unknown to the planner', fix
    yield from _batch(train, parallel)
    if isinstance(model, GptSpec):
        yield from depth(parallel.stages * parallel.chunks, parallel.stages, model.layers)


def _slices(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Keys that cannot be combined with slices along the sequence."""
    if parallel.slices == 1:
        return
    fix = "use slices: 1, or"
    if parallel.recompute not in ("none", "full") or parallel.keep is not None:
        why = "a stage in slices recomputes all of its activations or none"
        yield "parallel.slices", why, f"{fix} recompute: full or none, without keep"
    if parallel.tensor > 1:
        yield "parallel.slices", f"cannot be combined with tensor: {parallel.tensor}", f"{fix} tensor: 1"
    if train.compile != "none":
        why = f"compiled stages (compile: {train.compile}) run whole micro-batches"
        yield "parallel.slices", why, f"{fix} train.compile: none"
    if parallel.late_updates:
        key = "side_stream" if parallel.side_stream is not None else f"sync: {parallel.sync}"
        yield "parallel.slices", f"cannot be combined with {key}", f"{fix} leave that out"


def _batch(train: TrainSpec, parallel: ParallelSpec) -> Iterator[BrokenRule]:
    batch = train.batch
    unit = parallel.microbatch * parallel.sample_copies
    if batch % unit:
        low, high = neighbours(batch, unit)
        copies = f"replicas = {parallel.replicas}"
        yield (
            "train.batch",
            f"{batch} is not divisible by microbatch = {parallel.microbatch} times {copies}"
            + (f" / context = {parallel.context}" if parallel.context > 1 else ""),
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


MOST_LAYERS = 4096
"""A plan lists every layer and the planner considers every cut, which takes seconds for so many. The deepest published
transformer has 1,000 layers (DeepNet, arXiv:2203.00555)."""
MOST_VALUES = 2**40
"""Values of one tensor, which one device has to hold: 4 TiB in float32."""


def too_large(model: GptSpec, microbatch: int) -> Iterator[BrokenRule]:
    """Yield (key, why, fix) for each size of the built-in GPT that is too large for any device."""
    if model.layers > MOST_LAYERS:
        deep = "a plan lists every layer, and the deepest published transformer has 1000"
        yield "model.layers", f"is above {MOST_LAYERS}: {deep}", f"use at most {MOST_LAYERS}"
    if 4 * model.hidden**2 > MOST_VALUES:
        yield "model.hidden", _too_big("a matrix of the MLP"), f"use at most {isqrt(MOST_VALUES // 4)}"
        return
    most = MOST_VALUES // model.hidden
    for key, rows in (("vocabulary", model.vocabulary), ("positions", model.positions or 0)):
        if rows > most:
            yield f"model.{key}", _too_big(f"the matrix of {key} times hidden"), f"use at most {most}"
            return
    widest = max(4 * model.hidden, model.vocabulary)
    for key, size, times in (
        ("model.sequence", model.sequence, widest),
        ("parallel.microbatch", microbatch, widest * model.sequence),
    ):
        if size * times > MOST_VALUES:
            yield key, _too_big("an activation of a micro-batch"), f"use at most {max(1, MOST_VALUES // times)}"
            return


def too_many(parallel: ParallelSpec) -> Iterator[BrokenRule]:
    """Yield (key, why, fix) if a job asks for more than ``MOST_DEVICES`` devices."""
    if parallel.devices > MOST_DEVICES:
        sizes = {key: getattr(parallel, key) for key in ("stages", "replicas", "tensor")}
        key = max(sizes, key=lambda k: sizes[k])
        others = parallel.devices // sizes[key]
        why = f"{parallel.devices} devices in all (stages x replicas x tensor), above the limit of {MOST_DEVICES}"
        yield f"parallel.{key}", why, f"use at most {max(1, MOST_DEVICES // others)}"


def _too_big(what: str) -> str:
    return f"{what} would have more than 2^40 values (4 TiB in float32), and one device has to hold it"
