"""Rules between the fields of a job, each with what to write instead, and what cannot be asked for yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from raypipe.errors import nearest

if TYPE_CHECKING:
    from raypipe.job.spec import JobSpec, ModelSpec, ParallelSpec, TrainSpec

SCHEDULES_NOW = ("gpipe", "1f1b", "dapple", "interleaved-1f1b", "chimera")
"""Schedules a job can run."""
SCHEDULES_LATER = (
    *("bfs", "gems", "pipedream", "pipedream-2bw", "zb-h1", "zb-h2", "zb-v", "zeropp", "early-recompute"),
    *("shifted-critical-path", "model-parallel", "fast-forward", "modulo", "auto"),
)
"""Names that are spelt right but that no job can run yet."""
AVAILABLE: dict[str, tuple[object, ...]] = {
    "unit": (None,),
    "concat": ("direct",),
    "shard": ("none",),
    "sync": ("lazy", "eager", "eager-opt"),
    "recompute": ("none",),
    "tensor": (1,),
}
"""Per key of ``parallel``, the values that work today; the others are refused instead of ignored."""


class Problem(NamedTuple):
    """What is wrong with which key, and what to do."""

    key: str
    why: str
    fix: str


def problems(job: JobSpec) -> Iterator[Problem]:
    """All broken rules, the most basic first."""
    yield from _model(job.model)
    if job.model.vocabulary < 256:
        yield Problem("model.vocabulary", f"{job.model.vocabulary}, but bytes take 256 values", "use 256")
    yield from _train(job.train)
    yield from _available(job.parallel)
    yield from _cut(job)
    yield from _batch(job)


def _model(model: ModelSpec) -> Iterator[Problem]:
    if model.hidden % model.heads:
        low, high = neighbours(model.hidden, model.heads)
        yield Problem(
            "model.hidden",
            f"{model.hidden} is not divisible by heads = {model.heads}",
            f"use {_either(low, high)}, or another number of heads",
        )


def _train(train: TrainSpec) -> Iterator[Problem]:
    if train.lr_schedule != "constant" and train.warmup_steps >= train.steps:
        yield Problem(
            "train.warmup_steps",
            f"{train.warmup_steps} leaves no step for the {train.lr_schedule} decay: steps = {train.steps}",
            f"use at most {train.steps - 1}",
        )
    if train.min_lr > train.lr:
        yield Problem("train.min_lr", f"{train.min_lr} is above lr = {train.lr}", "lower min_lr or raise lr")


def _available(parallel: ParallelSpec) -> Iterator[Problem]:
    name = parallel.schedule
    if name in SCHEDULES_LATER:
        yield Problem("parallel.schedule", f'"{name}" is not available yet', "use one of " + ", ".join(SCHEDULES_NOW))
    elif name not in SCHEDULES_NOW:
        yield Problem("parallel.schedule", f'no schedule is called "{name}"', nearest(name, SCHEDULES_NOW))
    for key, values in AVAILABLE.items():
        value = getattr(parallel, key)
        if value not in values:
            allowed = " or ".join("null" if v is None else str(v) for v in values)
            yield Problem(f"parallel.{key}", f"{value} is not available yet", f"use {allowed}, or leave the key out")


def _cut(job: JobSpec) -> Iterator[Problem]:
    parallel, layers = job.parallel, job.model.layers
    if parallel.chunks > 1 and parallel.schedule != "interleaved-1f1b":
        yield Problem(
            "parallel.chunks",
            f"{parallel.schedule} puts one stage on a device, not {parallel.chunks}",
            "use chunks: 1, or schedule: interleaved-1f1b",
        )
    if parallel.schedule == "chimera" and parallel.stages % 2:
        low, high = neighbours(parallel.stages, 2)
        yield Problem(
            "parallel.stages",
            f"chimera runs two pipelines in opposite directions and needs an even number of stages, not "
            f"{parallel.stages}",
            f"use {_either(low, high)}",
        )
    yield from _pipelines(parallel)
    if parallel.model_stages > layers:
        each = f" (stages = {parallel.stages} times chunks = {parallel.chunks})" if parallel.chunks > 1 else ""
        yield Problem(
            "parallel.stages",
            f"{parallel.model_stages} stages{each} for a model of {layers} layer{'s' * (layers > 1)}",
            f"use at most {layers} in all, or a deeper model (model.layers)",
        )


def _pipelines(parallel: ParallelSpec) -> Iterator[Problem]:
    count = parallel.pipelines
    if parallel.schedule != "chimera":
        if count != 2:
            yield Problem(
                "parallel.pipelines", f"{parallel.schedule} has no use for it", "leave it out, or use schedule: chimera"
            )
    elif parallel.stages % 2 == 0:
        # Each pair of opposite pipelines starts an equal way along the devices (Chimera section 3.6).
        half = parallel.stages // 2
        valid = [2 * f for f in range(1, half + 1) if half % f == 0]
        if count not in valid:
            yield Problem(
                "parallel.pipelines",
                f"{count} pipelines don't spread evenly over {parallel.stages} stages",
                "use " + " or ".join(map(str, valid)),
            )


def _batch(job: JobSpec) -> Iterator[Problem]:
    parallel, batch = job.parallel, job.train.batch
    unit = parallel.microbatch * parallel.replicas
    if batch % unit:
        low, high = neighbours(batch, unit)
        yield Problem(
            "train.batch",
            f"{batch} is not divisible by microbatch = {parallel.microbatch} times replicas = {parallel.replicas}",
            f"use {_either(low, high)}, or another microbatch",
        )


def neighbours(value: int, unit: int) -> tuple[int, int]:
    """The multiples of ``unit`` below and above ``value``; below is 0 where there is none.

    >>> neighbours(30, 8)
    (24, 32)
    """
    low = value // unit * unit
    return low, low + unit


def _either(low: int, high: int) -> str:
    return f"{low} or {high}" if low else str(high)
