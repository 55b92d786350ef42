"""Layouts as YAML of NeMo AutoModel (0.7), to lay over a recipe with its model and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec, Shard
from raypipe.job.spec import JobSpec
from raypipe.plan.emit.layout import Settings, TrainerLayout, even_cut, layer_by_layer
from raypipe.plan.emit.nearest import Abilities
from raypipe.plan.emit.torchtitan import NAMES, Names, scheduled, written

ABLE = Abilities(
    title="AutoModel",
    schedules=tuple(NAMES),
    orders=True,
    shards={"none": "none", "zero1": "zero2", "zero2": "zero2", "zero3": "zero3"},
    pipelined_shards={"none": "zero2", "zero1": "zero2", "zero2": "zero2", "zero3": "zero3"},
    shard_groups=("zero2", "zero3"),
    experts="shards",
    context="shards",
    lazy=(),
    eager=("none", "zero2", "zero3"),
    eager_pipelines=True,
    full_pipelines=True,
)
MODULES = Names("model.embed_tokens", "model.layers.", ("model.norm", "lm_head"), ("model.rotary_emb",))
D = "distributed."


def write(layout: TrainerLayout, job: JobSpec, file: Path | None = None) -> str:
    """Return the YAML; an order that has no name goes into a CSV beside ``file``."""
    p = layout.parallel
    whole = p.shard == "none" and not layout.pipelined and p.tensor == p.context == 1
    distributed: dict[str, Any] = {"strategy": "ddp" if whole else "fsdp2", "dp_size": p.sample_copies}
    if not whole:
        distributed |= {"tp_size": p.tensor, "pp_size": p.stages, "reshard_after_forward": p.shard == "zero3"}
        if p.shard_replicas is not None:
            distributed["dp_replicate_size"] = p.replicas // p.shard_replicas
        if p.tensor > 1:
            distributed["sequence_parallel"] = p.sequence_parallel
        if p.context > 1:
            distributed["cp_size"] = p.context
        if p.experts > 1:
            distributed["ep_size"] = p.experts
    distributed["activation_checkpointing"] = p.recompute != "none"
    if layout.pipelined:
        schedule = written(layout, file)
        distributed["pipeline"] = {
            "pp_schedule": schedule["schedule"],
            **({"pp_schedule_csv": schedule["csv"]} if "csv" in schedule else {}),
            "pp_microbatch_size": p.microbatch,
            "module_fqns_per_model_part": MODULES.of(layout.block_cut),
        }
    scheduler = {
        "global_batch_size": layout.batch,
        "local_batch_size": layout.batch // p.sample_copies if layout.pipelined else p.microbatch,
        "max_steps": job.train.steps,
    }
    return yaml.safe_dump({"step_scheduler": scheduler, "distributed": distributed}, sort_keys=False, width=110)


def read(text: str, source: str, devices: int, blocks: int) -> TrainerLayout:
    """Read the YAML; arguments as of ``torchtitan.read``.

    Raises:
        SpecError: it is no YAML, a key asks for what no plan has, or the numbers do not divide.
    """
    try:
        nested = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(source, f"is no YAML: {error}", "give a file that --emit wrote") from None
    settings = Settings.of_keys(nested, source)
    ddp = settings.choice(f"{D}strategy", {"ddp": True, "fsdp2": False}, False)
    tensor, stages, context = (settings.whole(f"{D}{key}_size") for key in ("tp", "pp", "cp"))
    each = tensor * stages * context
    free = settings.divided(f"{D}dp_size", devices, each) if f"{D}dp_size" not in settings.values else 1
    apart, replicate = settings.whole(f"{D}dp_size", free), settings.whole(f"{D}dp_replicate_size")
    replicas = apart * context
    group = settings.divided(f"{D}dp_replicate_size", replicas, replicate)
    local = settings.whole("step_scheduler.local_batch_size")
    level: Shard = settings.choice(
        f"{D}reshard_after_forward", {"false": "zero2", "true": "zero3"}, "zero2" if stages > 1 else "zero3"
    )
    parts, key = settings.values.get(f"{D}pipeline.module_fqns_per_model_part"), f"{D}pipeline.pp_schedule"
    chunks = 1 if str(settings.values.get(key, "1F1B")).upper() in ("1F1B", "GPIPE") else 2
    layout = TrainerLayout(
        parallel=ParallelSpec(
            stages=stages,
            replicas=replicas,
            microbatch=settings.whole(f"{D}pipeline.pp_microbatch_size") if stages > 1 else local,
            tensor=tensor,
            experts=settings.experts(f"{D}ep_size", replicas, tensor),
            context=context,
            innermost="replicas",
            shard="none" if ddp or group == 1 else level,
            shard_replicas=group if 1 < replicate < replicas else None,
            sync="eager" if replicas > 1 else "lazy",
            update="wait",
            recompute="full" if settings.flag(f"{D}activation_checkpointing") else "none",
        ),
        cut=MODULES.cut(parts, settings, f"{D}pipeline.module_fqns_per_model_part")
        if parts
        else even_cut(blocks, stages * chunks),
        batch=settings.whole("step_scheduler.global_batch_size", local * apart),
    )
    if stages > 1:
        layout = scheduled(layout, settings, key, f"{D}pipeline.pp_schedule_csv")
    return layer_by_layer(layout)
