"""The jobs and plans that sessions run, and how."""

from __future__ import annotations

from typing import Any

from raypipe.errors import SpecError
from raypipe.job.model_spec import HfSpec
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers, LayeredModel
from raypipe.models.captured import CapturedModel
from raypipe.models.task import NextToken
from raypipe.plan.plan import Plan
from raypipe.runtime.session.call_data import Limits
from raypipe.schedule.ir import Schedule

REFUSED = "sessions run"
"""How the reasons for which jobs are refused begin."""


def check_job(job: JobSpec, plan: Plan) -> None:
    """Raise SpecError where a job or its plan asks for what sessions do not have."""
    parallel, train = plan.parallel, job.train
    wanted: list[tuple[str, Any, Any, str]] = [
        ("train.optimizer", train.optimizer, "adamw", "AdamW"),
        ("train.compile", train.compile, "none", "stages eagerly"),
        ("train.cuda_graphs", train.cuda_graphs, "none", "stages eagerly"),
        ("train.tokens_per_step", train.tokens_per_step, None, "the sequences of their calls"),
        ("train.label_smoothing", train.label_smoothing, 0, "the losses of their calls"),
        ("train.loss_chunk_tokens", train.loss_chunk_tokens, None, "whole logits"),
        ("parallel.tensor", parallel.tensor, 1, "without tensor parallelism"),
        ("parallel.experts", parallel.experts, 1, "without expert parallelism"),
        ("parallel.slices", parallel.slices, 1, "whole sequences"),
        ("parallel.context", parallel.context, 1, "whole sequences"),
        ("parallel.vocabulary", parallel.vocabulary, "whole", "whole logits"),
        ("parallel.shard", parallel.shard, "none", "replicas that hold whole stages"),
        ("parallel.side_stream", parallel.side_stream, None, "one stream"),
        ("parallel.placement", parallel.placement == "branches", False, "models that are a chain"),
    ]
    for key, have, want, how in wanted:
        if have != want:
            raise SpecError(key, f"{REFUSED} {how}", f"set {key} to {want}, or use raypipe train")
    if parallel.by_layer:
        raise SpecError("parallel.sync", f"{REFUSED} updates of their own", "use sync: lazy, or raypipe train")
    if plan.one_copy().versions != "flush":
        why = f"{REFUSED} synchronous schedules, and {parallel.schedule} keeps several versions of the weights"
        raise SpecError("parallel.schedule", why, "use 1f1b, zb-h1, zb-v or chimera")


def asked_of_workers(job: JobSpec) -> JobSpec:
    """Return the job with which workers are set up: a call may clip, and a group of parameters that decays says so."""
    clips = {} if job.train.clip is not None else {"clip": 1.0}
    train = job.train.model_copy(update={"weight_decay": 1.0, "on_nonfinite": "stop", **clips})
    return job.model_copy(update={"train": train})


def limits_of(model: LayeredModel, job: JobSpec) -> Limits:
    """Return what a model takes.

    Raises:
        SpecError: it does not predict the next token of every position, or depends on the other sequences of a call.
    """
    if not isinstance(model.task, NextToken) or model.batch_statistics:
        raise SpecError("model", f"{REFUSED} language models that predict the next token", "use a causal one")
    if isinstance(model, GptLayers):
        return Limits(model.model.vocabulary, model.model.sequence)
    assert isinstance(model, CapturedModel)
    (logits,) = model.graph.outputs.values()
    kind = model.graph.operations[logits].type
    vocabulary = kind.shape[-1] if kind is not None else None
    if not isinstance(vocabulary, int):
        raise SpecError("model", "the size of its vocabulary is not fixed", "use a causal language model")
    return Limits(vocabulary, int(job.model.sequence or 1), model.shortest_slice)


def mixes(job: JobSpec, schedule: Schedule) -> bool:
    """Return whether several calls can run in one pass, each micro-batch on the weights of its own.

    Not where copies of a stage share out micro-batches by number, as a call's gradients would add up in another order
    than alone; where a task has several micro-batches, or runs in turns with another; or where each change between
    calls would round all weights of a stage anew.
    """
    one_each = all(len(task.mbs) == 1 for order in schedule.orders for task in order if task.mbs)
    adapters = isinstance(job.model, HfSpec) and job.model.lora is not None
    exact = job.train.dtype in ("float32", "float64")
    return len(schedule.placement) == 1 and one_each and not schedule.joined and (adapters or exact)
