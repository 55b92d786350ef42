"""Layouts as JSON of DeepSpeed (0.19), with the stage boundaries of its ``PipelineModule``."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec, Shard
from raypipe.job.spec import JobSpec
from raypipe.plan.emit.layout import Settings, TrainerLayout, even_cut, layer_by_layer
from raypipe.plan.emit.nearest import Abilities

ABLE = Abilities(
    title="DeepSpeed",
    schedules=("1f1b",),
    shards={"none": "none", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"},
    pipelined_shards={"none": "none", "zero1": "zero1", "zero2": "zero1", "zero3": "zero1"},
    lazy=("none", "zero1", "zero2"),
    eager=("zero1", "zero2", "zero3"),
    sequence=False,
)
"""``PipelineEngine`` refuses ZeRO-2 and ZeRO-3, and reduces after the last backward."""
Z = "zero_optimization."


def write(layout: TrainerLayout, job: JobSpec, file: Path | None = None) -> str:
    """Return the JSON. ``pipeline.partition`` has the first layer of each stage and the number of layers, which
    ``PipelineModule.parts`` holds; the engine reads no such key, so the model's ``_partition_layers`` sets it."""
    p, train = layout.parallel, job.train
    config: dict[str, Any] = {
        "train_batch_size": layout.batch,
        "train_micro_batch_size_per_gpu": p.microbatch,
        "gradient_accumulation_steps": layout.microbatches,
    }
    if train.clip is not None:
        config["gradient_clipping"] = train.clip
    if train.dtype.startswith(("bfloat16", "fp8")):
        config["bf16"] = {"enabled": True}
    zero: dict[str, Any] = {"stage": 0 if p.shard == "none" else int(p.shard[-1])}
    if p.shard != "none":
        zero["overlap_comm"] = p.sync == "eager"
    config["zero_optimization"] = zero
    if p.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": p.tensor}
    if layout.pipelined:
        config["pipeline"] = {
            "stages": p.stages,
            "partition": [0, *(own.stop for own in layout.block_cut)],
            "activation_checkpoint_interval": layout.deepest + 1 if p.recompute == "full" else 0,
        }
    elif p.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(config, indent=1) + "\n"


def read(text: str, source: str, devices: int, blocks: int) -> TrainerLayout:
    """Read the JSON; arguments as of ``torchtitan.read``.

    Raises:
        SpecError: it is no JSON, a key asks for what no plan has, or the numbers do not divide.
    """
    try:
        settings = Settings.of_keys(json.loads(text), source)
    except ValueError as error:
        raise SpecError(source, f"is no JSON: {error}", "give a file that --emit wrote") from None
    microbatch = settings.whole("train_micro_batch_size_per_gpu", None)
    stages, tensor = settings.whole("pipeline.stages"), settings.whole("tensor_parallel.autotp_size")
    batch, key = settings.whole("train_batch_size", None), "gradient_accumulation_steps"
    free = settings.divided("pipeline.stages", devices, stages * tensor) if key not in settings.values else 1
    each = microbatch * settings.whole(key, max(1, batch // (microbatch * free)))
    replicas = settings.divided("train_batch_size", batch, each)
    words: dict[str, Shard] = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3"}
    shard = "none" if replicas == 1 else settings.choice(f"{Z}stage", words, "none")
    bounds = settings.values.get("pipeline.partition")
    cut = tuple(range(a, b) for a, b in pairwise(bounds)) if isinstance(bounds, list) else even_cut(blocks, stages)
    if len(cut) != stages or cut[0].start or cut[-1].stop != blocks + 2:
        raise settings.fail(
            "pipeline.partition", f"is no cut of {blocks + 2} layers in {stages} stages", "leave it out"
        )
    overlap = settings.flag(f"{Z}overlap_comm") or (shard == "zero3" and f"{Z}overlap_comm" not in settings.values)
    again = (
        settings.values.get("pipeline.activation_checkpoint_interval", 0)
        or "activation_checkpointing" in settings.values
    )
    return layer_by_layer(
        TrainerLayout(
            parallel=ParallelSpec(
                stages=stages,
                replicas=replicas,
                microbatch=microbatch,
                tensor=tensor,
                innermost="replicas",
                shard=shard,
                sync="eager" if overlap and replicas > 1 and stages == 1 and shard != "none" else "lazy",
                update="wait",
                recompute="full" if again else "none",
            ),
            cut=cut,
            batch=batch,
        )
    )
