"""Layouts as arguments of Megatron-LM's ``pretrain_gpt.py`` (megatron-core 0.16)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.job.parallel_spec import ParallelSpec, Shard
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.emit.layout import DecoderShape, Settings, TrainerLayout, cut_of, even_cut, layer_by_layer
from raypipe.plan.emit.nearest import Abilities, first_blocks, recomputed_blocks
from raypipe.plan.predict.prediction import Cut

ABLE = Abilities(
    title="Megatron-LM",
    schedules=("1f1b", "interleaved-1f1b"),
    shards={"none": "none", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3"},
    pipelined_shards={"none": "none", "zero1": "zero1", "zero2": "zero1", "zero3": "zero1"},
    shard_groups=("zero1", "zero2", "zero3"),
    innermost=("replicas", "stages"),
    lazy=("none", "zero1"),
    eager=("none", "zero1", "zero2", "zero3"),
    eager_pipelines=True,
    experts="copies",
    context="copies",
    some_layers=True,
)
STRATEGY: dict[Shard, str] = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
LEVEL: dict[str, Shard] = {"no_shard": "none", "optim": "zero1", **{word: shard for shard, word in STRATEGY.items()}}
WORLD = re.compile(r"^# WORLD_SIZE=(\d+)$", re.MULTILINE)


def write(layout: TrainerLayout, job: JobSpec, file: Path | None = None) -> str:
    """Return the arguments, one a line; ``WORLD_SIZE`` is in a comment, as Megatron reads it from the environment."""
    model, optimizer = DecoderShape.of(job), job.train.optimizer
    head = [f"WORLD_SIZE={layout.parallel.devices}"]
    if model.kind not in SPELLED:
        head.append(f"of the model these are the sizes alone: add what else {model.kind} has")
    known = ("default", "yarn" if model.kind in LATENT else "llama3")
    if (rope := _rope(model)["rope_type"]) not in known:
        head.append(f"rotary positions are plain in place of {rope}")
    if optimizer not in OPTIMIZERS:
        head.append(f"the optimizer is Adam in place of {optimizer}")
    if unsaid := [*_unsaid(model, job.train)]:
        head.append(f"no argument here says {', '.join(unsaid)}")
    return "".join(f"# {line}\n" for line in head) + "".join(f"--{line}\n" for line in _arguments(layout, job))


def _arguments(layout: TrainerLayout, job: JobSpec) -> Iterator[str]:
    p, train = layout.parallel, job.train
    yield from _model(DecoderShape.of(job))
    yield f"micro-batch-size {p.microbatch}"
    yield f"global-batch-size {layout.batch}"
    yield from _training(train)
    if train.dtype.startswith(("bfloat16", "fp8")):
        yield "bf16"
    if train.dtype == "fp8":
        yield "fp8-format hybrid"
    yield f"tensor-model-parallel-size {p.tensor}"
    if p.sequence_parallel:
        yield "sequence-parallel"
    yield f"pipeline-model-parallel-size {p.stages}"
    if p.context > 1:
        yield f"context-parallel-size {p.context}"
    if p.experts > 1:
        yield f"expert-model-parallel-size {p.experts}"
        yield "expert-tensor-parallel-size 1"
    if layout.pipelined:
        yield f"pipeline-model-parallel-layout {layout_string(layout.block_cut)}"
        if p.innermost == "stages" and p.replicas > 1:
            yield "use-tp-pp-dp-mapping"
    if p.shard == "zero1":
        yield "use-distributed-optimizer"
    elif p.shard != "none":
        yield "use-megatron-fsdp"
        yield f"data-parallel-sharding-strategy {STRATEGY[p.shard]}"
        yield "ckpt-format fsdp_dtensor"
        yield "no-gradient-accumulation-fusion"
    if p.shard_replicas is not None:
        yield f"num-distributed-optimizer-instances {p.replicas // p.shard_replicas}"
    if p.sync == "eager":
        yield "overlap-grad-reduce"
    if p.recompute != "none":
        yield "recompute-granularity full"
        whole = p.recompute == "full"
        some = layout.deepest if whole else recomputed_blocks(layout, layers_to_recompute(p, layout.cut) or set())
        yield f"recompute-method {'uniform' if whole else 'block'}"
        yield f"recompute-num-layers {some}"


def _unsaid(model: DecoderShape, train: TrainSpec) -> Iterator[str]:
    """Yield the job's keys that the arguments leave to Megatron-LM, which does otherwise."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if model.config.get(key):
            yield f"model.config.{key}"
    if train.weight_decay and train.decay == "all":  # it decays matrices alone
        yield "train.decay"
    for key, plain in (("groups", ()), ("lr_table", None), ("label_smoothing", 0.0)):
        if getattr(train, key) != plain:
            yield f"train.{key}"


def _training(train: TrainSpec) -> Iterator[str]:
    yield f"train-iters {train.steps}"
    yield f"optimizer {OPTIMIZERS.get(train.optimizer, 'adam')}"
    yield f"lr {train.lr:g}"
    yield f"lr-decay-style {train.lr_schedule}"
    if train.min_lr:
        yield f"min-lr {train.min_lr:g}"
    if train.warmup_steps:
        yield f"lr-warmup-iters {train.warmup_steps}"
    yield f"weight-decay {train.weight_decay:g}"
    if train.optimizer == "sgd":
        yield f"sgd-momentum {train.momentum:g}"
    else:
        for number, beta in enumerate(train.betas, 1):
            yield f"adam-beta{number} {beta:g}"
        yield f"adam-eps {train.eps:g}"
    yield f"clip-grad {train.clip or 0:g}"


def _model(model: DecoderShape) -> Iterator[str]:
    yield f"num-layers {model.blocks}"
    yield f"hidden-size {model.hidden}"
    yield f"num-attention-heads {model.heads}"
    if model.head not in (None, model.hidden // model.heads):
        yield f"kv-channels {model.head}"
    if model.norms_heads:
        yield "qk-layernorm"
    if model.intermediate is not None:
        yield f"ffn-hidden-size {model.intermediate}"
    if model.groups not in (None, model.heads):
        yield "group-query-attention"
        yield f"num-query-groups {model.groups}"
    yield f"seq-length {model.sequence}"
    yield f"max-position-embeddings {model.positions}"
    for argument, value in _as_they_stand(model):
        yield f"{argument} {value:g}" if isinstance(value, float) else f"{argument} {value}"
    if (rope := _rope(model))["rope_type"] == "llama3":
        yield "use-rope-scaling"
        yield f"rope-scaling-factor {rope.get('factor', 8.0):g}"
    yield f"attention-dropout {model.attention_dropout:g}"
    yield f"hidden-dropout {model.dropout:g}"
    if model.kind in LATENT:
        yield "multi-latent-attention"
        if rope["rope_type"] == "yarn":
            yield "rope-type yarn"
            yield f"rotary-scaling-factor {rope.get('factor', 1.0):g}"
            yield f"mscale {rope.get('mscale', 1.0):g}"
            yield f"mscale-all-dim {rope.get('mscale_all_dim', 0.0):g}"
        else:  # Megatron-LM's own choice for latent attention is yarn
            yield "rope-type rope"
    if model.kind.startswith("qwen2"):
        yield "add-qkv-bias"
    if model.llama:
        yield "position-embedding-type rope"
        yield "normalization RMSNorm"
        yield "swiglu"
        yield "disable-bias-linear"
    if model.experts is not None:
        yield f"num-experts {model.experts}"
        yield f"moe-router-topk {model.per_token}"
        yield "moe-token-dispatcher-type alltoall"
        yield "moe-grouped-gemm"
        if model.expert_width is not None:
            yield f"moe-ffn-hidden-size {model.expert_width}"
        if model.shared_width is not None:
            yield f"moe-shared-expert-intermediate-size {model.shared_width}"
            if model.kind == "qwen2_moe":
                yield "moe-shared-expert-gate"
        if model.kind in RAW_WEIGHTS and not model.config.get("norm_topk_prob"):
            yield "moe-router-pre-softmax"
        if model.dense_first:
            yield f"moe-layer-freq ([0]*{model.dense_first}+[1]*{model.blocks - model.dense_first})"
        if model.kind == "deepseek_v3":
            yield "moe-router-score-function sigmoid"
            yield "moe-router-enable-expert-bias"
    if not model.tied:
        yield "untie-embeddings-and-output-weights"


RAW_WEIGHTS = ("deepseek_v2", "qwen2_moe", "qwen3_moe")
"""Types whose routers weigh the chosen experts by the softmax over all of them, unless ``norm_topk_prob`` is set."""
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
"""Megatron-LM's names of optimizers."""
SPELLED = ("gpt", "gpt2", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Types of models that the arguments describe in full."""
_ATTENTION = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT = {
    "deepseek_v2": _ATTENTION,
    "deepseek_v3": (*_ATTENTION, "q_lora_rank", "n_group", "topk_group", "routed_scaling_factor"),
}
"""Types with latent attention: the keys that Megatron-LM does not have the same defaults for."""
AS_THEY_STAND = {
    "rms_norm_eps": "norm-epsilon",
    "layer_norm_epsilon": "norm-epsilon",
    "rope_theta": "rotary-base",
    "q_lora_rank": "q-lora-rank",
    "kv_lora_rank": "kv-lora-rank",
    "qk_nope_head_dim": "qk-head-dim",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
    "v_head_dim": "v-head-dim",
    "n_group": "moe-router-num-groups",
    "topk_group": "moe-router-group-topk",
    "routed_scaling_factor": "moe-router-topk-scaling-factor",
}
"""Keys of Hugging Face configurations, and Megatron-LM's arguments for the same number."""


def _rope(model: DecoderShape) -> Mapping[str, Any]:
    """Return what a configuration says of rotary positions, in transformers' words before and since its version 5."""
    result = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    return {"rope_type": result.get("type", "default"), **result}


def _as_they_stand(model: DecoderShape) -> Iterator[tuple[str, float]]:
    """Return arguments that repeat a number of the configuration.

    Raises:
        SpecError: one is not given that latent attention, or its router, needs.
    """
    config = {
        **({"rms_norm_eps": 1e-6} if model.llama else {}),
        **model.config,
        **_rope(model),
    }  # as transformers has it
    for key in LATENT.get(model.kind, ()):
        if config.get(key) is None:
            raise SpecError(f"model.config.{key}", "is not given", "give it: the trainer needs it")
    for key, argument in AS_THEY_STAND.items():
        value = config.get(key)
        if isinstance(value, (int, float)):
            yield argument, int(value) if key == "rope_theta" else value


def layout_string(cut: Cut) -> str:
    """Return Megatron's words for a cut: E the embedding, t a block, L the head.

    >>> layout_string((range(0, 2), range(2, 5)))
    'Et|t*2L'
    """
    layers = cut[-1].stop

    def words(own: range) -> str:
        blocks = sum(0 < i < layers - 1 for i in own)
        block = f"t*{blocks}" if blocks > 1 else "t" * blocks
        return "E" * (0 in own) + block + "L" * (layers - 1 in own)

    return "|".join(map(words, cut))


def cut_from_string(text: str, settings: Settings) -> Cut:
    """Read the words of ``layout_string``, and those of Megatron's documentation: ``Et*3|(tt|)*29,m|L``.

    Raises:
        SpecError: there is something else in it, such as a layer for multi-token prediction.
    """
    plain = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        plain = re.sub(pattern, lambda match: match[1] * int(match[2]), plain)
    if re.fullmatch(r"E[t|]*L", plain) is None:
        why = f'"{text}" is not an embedding (E), blocks (t) and a head (L) in stages (|)'
        raise settings.fail("pipeline-model-parallel-layout", why, "give one such as Et*3|t*4L")
    ends = [len(part) for part in plain.split("|")]
    starts = [sum(ends[:s]) for s in range(len(ends))]
    return tuple(range(a, a + size) for a, size in zip(starts, ends, strict=True))


def read(text: str, source: str, devices: int, blocks: int) -> TrainerLayout:
    """Read arguments.

    Args:
        text: the file.
        source: its name, for messages.
        devices: of the whole job, where no comment says ``WORLD_SIZE``.
        blocks: of the model.

    Raises:
        SpecError: an argument asks for what no plan has, or the numbers do not divide.
    """
    settings = Settings.of_arguments(text, source)
    settings.refuse("expert-tensor-parallel-size")
    world = WORLD.search(text)
    devices = devices if world is None else int(world[1])
    tensor, stages = (settings.whole(f"{key}-model-parallel-size") for key in ("tensor", "pipeline"))
    context = settings.whole("context-parallel-size")
    replicas = settings.divided("pipeline-model-parallel-size", devices, tensor * stages)
    apart = settings.divided("context-parallel-size", replicas, context)
    experts = settings.experts("expert-model-parallel-size", replicas, tensor)
    cut = _cut(settings, stages, blocks)
    shard: Shard = "none"
    if settings.flag("use-megatron-fsdp"):
        shard = settings.choice("data-parallel-sharding-strategy", LEVEL, "none")
    elif settings.flag("use-distributed-optimizer"):
        shard = "zero1"
    instances = settings.whole("num-distributed-optimizer-instances")
    microbatch = settings.whole("micro-batch-size", None)
    parallel = ParallelSpec(
        schedule="interleaved-1f1b" if len(cut) > stages else "1f1b",
        stages=stages,
        replicas=replicas,
        microbatch=microbatch,
        chunks=len(cut) // stages,
        tensor=tensor,
        sequence_parallel=tensor > 1 and settings.flag("sequence-parallel"),
        experts=experts,
        context=context,
        innermost="stages" if settings.flag("use-tp-pp-dp-mapping") and context == 1 else "replicas",
        shard=shard if replicas > 1 else "none",
        shard_replicas=None
        if instances == 1
        else settings.divided("num-distributed-optimizer-instances", replicas, instances),
        sync="eager" if settings.flag("overlap-grad-reduce") and replicas > 1 else "lazy",
        update="wait",
    )
    layout = TrainerLayout(parallel=parallel, cut=cut, batch=settings.whole("global-batch-size", microbatch * apart))
    return layer_by_layer(_recomputed(layout, settings))


def _cut(settings: Settings, stages: int, model_blocks: int) -> Cut:
    given = settings.values.get("pipeline-model-parallel-layout")
    if given is not None:
        cut = cut_from_string(str(given), settings)
        settings.divided("pipeline-model-parallel-layout", len(cut), stages)
        return cut
    blocks = settings.whole("num-layers", model_blocks)
    ends = {key: settings.values.get(f"decoder-{key}-pipeline-num-layers") for key in ("first", "last")}
    if any(value is not None for value in ends.values()):
        first, last = (
            [settings.whole(f"decoder-{key}-pipeline-num-layers")] if value is not None else []
            for key, value in ends.items()
        )
        inner = stages - len(first) - len(last)
        each = settings.divided("num-layers", blocks - sum(first) - sum(last), inner) if inner else 0
        return cut_of([*first, *[each] * inner, *last])
    chunks = settings.whole("num-virtual-stages-per-pipeline-rank")
    if "num-layers-per-virtual-pipeline-stage" in settings.values:
        each = settings.whole("num-layers-per-virtual-pipeline-stage")
        chunks = settings.divided("num-layers-per-virtual-pipeline-stage", blocks, stages * each)
    return even_cut(blocks, stages * chunks)


def _recomputed(layout: TrainerLayout, settings: Settings) -> TrainerLayout:
    if "recompute-granularity" not in settings.values:
        return layout
    settings.choice("recompute-granularity", {"full": True}, True)
    whole = settings.choice("recompute-method", {"uniform": True, "block": False}, True)
    count = settings.whole("recompute-num-layers")
    if whole or count >= layout.deepest:
        return layout.with_keys(recompute="full")
    return layout.with_keys(recompute=first_blocks(layout, count))
