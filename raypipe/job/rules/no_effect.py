"""Keys that would have no effect beside the others of a job: refused by name instead of ignored.

One row of ``RULES`` a condition; a key at its default is never refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from raypipe.job.data_spec import DataSpec
from raypipe.job.model_spec import GptSpec, ModelSpec
from raypipe.job.parallel_spec import BUDGET, ParallelSpec
from raypipe.job.train_spec import OPTIMIZERS, TrainSpec

BrokenRule = tuple[str, str, str]
"""The key of a rule that a job breaks, the reason, and what to do."""


class Parts(NamedTuple):
    """The parts of a job that keys are in."""

    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    parallel: ParallelSpec


class Rule(NamedTuple):
    """When some keys have an effect."""

    keys: tuple[str, ...]
    """As in a job file, with their section."""
    used: Callable[[Parts], bool]
    """Returns whether they have an effect."""
    why: str
    """Why not, where they have none; may name fields of ``Parts`` in braces."""
    fix: str


def _masks(job: Parts) -> bool:
    """Return whether tokens may be masked; what a model's own task is where the job names none, is known later."""
    if isinstance(job.model, GptSpec) or job.data.type == "arrays":
        return False
    return getattr(job.model, "task", None) in (None, "masked-lm")


def _may_be(job: Parts, key: str, *values: str) -> bool:
    """Return whether a key of ``parallel`` has one of these values, or the planner may choose one."""
    chosen = job.parallel.auto and key not in job.parallel.given
    return chosen or getattr(job.parallel, key) in values


def _may_be_divided(job: Parts) -> bool:
    return job.parallel.auto or job.parallel.tensor > 1


OUT = "leave it out"


def _of_optimizers(key: str) -> Rule:
    """Return the rule of an option of some optimizers."""
    readers = [name for name, kind in OPTIMIZERS.items() if key in kind.options]
    return Rule(
        (f"train.{key}",),
        lambda job: job.train.optimizer in readers,
        "has no effect with optimizer: {train.optimizer}",
        f"{OUT}, or use {' or '.join(readers)}",
    )


UNMASKED = "has no effect where text is not masked for a model that predicts it"
"""Why there may be no ``data.mask``."""
RULES = (
    Rule(("data.held_out",), lambda job: job.data.type in ("arrays", "documents"), "text is split by file", OUT),
    Rule(
        ("data.order", "data.group_by_length"),
        lambda job: job.data.type == "arrays",
        "has no effect on {data.type}",
        f"{OUT}, or use arrays",
    ),
    Rule(
        ("data.group_by_length",),
        lambda job: job.data.order is None,
        "has no effect where data.order gives the rows",
        "leave one of them out",
    ),
    Rule(
        ("train.tokens_per_step",),
        lambda job: job.data.type == "arrays",
        "packs rows of arrays, and has no effect on {data.type}",
        f"{OUT}, or tokenise the documents into arrays (docs/guides/data.md#token-budgets)",
    ),
    Rule(
        ("train.microbatch_tokens", "data.long_documents"),
        lambda job: job.train.tokens_per_step is not None,
        "has no effect where a step takes samples",
        f"{OUT}, or set train.tokens_per_step",
    ),
    Rule(
        ("data.order", "data.group_by_length"),
        lambda job: job.train.tokens_per_step is None,
        "has no effect where train.tokens_per_step says which documents a step takes",
        "leave one of them out",
    ),
    Rule(
        ("data.column", "data.tokenizer", "data.block_mb", "data.shuffle_blocks", "data.num_workers"),
        lambda job: job.data.type == "documents",
        "has no effect on {data.type}",
        f"{OUT}, or use data.type: documents",
    ),
    Rule(
        ("data.pad_to_multiple_of",),
        lambda job: job.data.type in ("arrays", "lines"),
        "has no effect on {data.type}, whose samples are equally long",
        f"{OUT}, or use arrays or lines",
    ),
    Rule(("data.mask",), _masks, UNMASKED, OUT),
    Rule(
        ("model.loss_args", "model.loss_per"),
        lambda job: isinstance(job.model, GptSpec) or getattr(job.model, "loss", "task") not in ("task", "model"),
        "is for a loss function, and model.loss names none",
        OUT,
    ),
    *map(_of_optimizers, ("betas", "eps", "momentum", "alpha", "muon_rate", "muon_excludes")),
    Rule(
        ("train.lr_schedule", "train.warmup_steps", "train.warmup_from_zero", "train.min_lr"),
        lambda job: job.train.lr_table is None,
        "has no effect where train.lr_table gives the rates",
        "leave one of them out",
    ),
    Rule(
        ("train.min_lr",),
        lambda job: job.train.lr_schedule != "constant",
        "has no effect with lr_schedule: {train.lr_schedule}",
        f"{OUT}, or use cosine or linear",
    ),
    Rule(
        ("train.warmup_from_zero",),
        lambda job: job.train.warmup_steps > 0,
        "has no effect without warm-up steps",
        f"{OUT}, or set train.warmup_steps",
    ),
    Rule(
        ("train.compile_first", "train.compile_timeout_s"),
        lambda job: job.train.compile != "none",
        "has no effect without compiled stages",
        "set train.compile to inductor",
    ),
    Rule(
        (f"parallel.{BUDGET}",),
        lambda job: job.train.compile != "none",
        "has no effect without compiled stages",
        "set train.compile to inductor, or use parallel.recompute",
    ),
    Rule(
        ("train.standby",),
        lambda job: job.train.recovery == "in-place" or job.train.elastic is not None,
        "has no effect with recovery: {train.recovery}",
        f"{OUT}, or use in-place",
    ),
    Rule(
        ("parallel.first_k",),
        lambda job: job.parallel.postpones,
        "has no effect with sync: {parallel.sync}",
        f"{OUT}, or use sync: reverse-first-k",
    ),
    Rule(
        ("parallel.shard_replicas", "parallel.gather"),
        lambda job: _may_be(job, "shard", "zero1", "zero2", "zero3"),
        "with shard: none there are no shards",
        OUT,
    ),
    Rule(
        ("parallel.keep",),
        lambda job: job.parallel.recompute != "none",
        "has no effect with recompute: {parallel.recompute}",
        f"{OUT}, or use recompute: full",
    ),
    Rule(
        ("parallel.alphas",),
        lambda job: job.parallel.recompute == "stage-aware",
        "has no effect with recompute: {parallel.recompute}",
        f"use recompute: stage-aware, or {OUT}",
    ),
    Rule(
        ("parallel.memory_cap_mb",),
        lambda job: job.parallel.recompute == "stage-aware" or job.parallel.postpones,
        "has no effect with recompute: {parallel.recompute}",
        f"use recompute: stage-aware, or {OUT}",
    ),
    Rule(
        ("parallel.tensor_table",),
        _may_be_divided,
        "no layer is divided with tensor: 1",
        f"{OUT}, or raise tensor",
    ),
    Rule(
        ("parallel.expert_order",),
        lambda job: job.parallel.experts > 1,
        "no experts are divided with experts: 1",
        f"{OUT}, or raise experts",
    ),
    Rule(
        ("parallel.imbalance",),
        lambda job: job.parallel.auto,
        "is read by the planner alone",
        f"{OUT}, or use auto: true",
    ),
    Rule(
        ("parallel.sequence_parallel",),
        _may_be_divided,
        "no layer is divided with tensor: 1",
        f"{OUT}, or raise tensor",
    ),
    Rule(
        ("parallel.sub_pipelined",),
        _may_be_divided,
        "there is no all-reduce to overlap with tensor: 1",
        f"{OUT}, or raise tensor",
    ),
)


def without_effect(job: Parts) -> Iterator[BrokenRule]:
    """Yield the keys that have no effect in a job, why, and what to do."""
    for rule in RULES:
        if rule.used(job):
            continue
        for key in rule.keys:
            section, name = key.split(".")
            part = getattr(job, section)
            field = type(part).model_fields.get(name)
            if field is not None and getattr(part, name) != field.get_default(call_default_factory=True):
                yield key, rule.why.format(**job._asdict()), rule.fix
