"""From a published row to raypipe's prediction of that very layout.

What raypipe has no key for is translated into the work of a layer, as the trainer of the row does it: activations that
are recomputed block by block, sequence parallelism, collectives of tensor parallelism beside its products.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from raypipe.cost.analytic import analytic_profile, update_bytes
from raypipe.cost.experts import divided_experts, reached
from raypipe.cost.layer_work import LayerWork
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import divided_sequences
from raypipe.cost.stages import with_reduce_dtype
from raypipe.cost.tensor import tensor_profile
from raypipe.job import job_from, load_cluster
from raypipe.job.cluster import ClusterSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.choose import Decision, choose
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.prediction import Cut, Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Sharing
from raypipe.plan.watch import Watch
from raypipe.schedule.shape import Grid, Innermost
from raypipe.search.budget import Budget
from tests.bench.published.models import MODELS, joined, works
from tests.bench.published.trainers import (
    FLEX,
    MASKED,
    Recompute,
    attending,
    biased,
    checkpointed,
    divided,
    gathered,
    megatrons,
    rotated,
)

MIXTURES = ("gpt-oss", "mixtral", "deepseek", "qwen3-30b", "qwen3-235b", "kimi", "glm-4.5")
"""How names of models with experts begin."""
ROWS = Path(__file__).parent / "rows.json"
GIB = 2**30
TITAN = "torchtitan"
FOREACH = 92
"""Bytes a parameter of AdamW by PyTorch's ``foreach`` kernels, torchtitan's default in 2024: decay 8, first moment 12,
second 8 + 12, its root and two sums with it 24, the step 16, and 12 to clip."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published measurement and its layout."""

    source: str
    model: str
    gpus: int
    precision: str
    batch: int
    microbatch: int | None
    sequence: int
    tensor: int
    pipeline: int
    context: int
    chunks: int
    expert: int
    sharded: int | None
    tokens_per_s_per_gpu: float
    local_batch: int | None = None
    """Samples of a copy that run through the pipeline at once, where the step has more (gradient accumulation)."""
    memory_gib: float | None = None
    model_tflops_per_gpu: float | None = None
    note: str = ""

    @property
    def replicas(self) -> int:
        """Data-parallel copies with samples of their own."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def experts(self) -> bool:
        """Whether the model has experts, divided or not."""
        return self.expert > 1 or self.model.startswith(MIXTURES)

    @property
    def refused(self) -> str:
        """Why raypipe cannot express the layout; empty if it can."""
        return "" if self.model in MODELS else "a model that this bench does not describe"


def rows(file: Path = ROWS) -> tuple[Row, ...]:
    """Read published rows, of a file in the form of this bench's own."""
    return tuple(Row(**row) for row in json.loads(file.read_text())["rows"])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is trained: a row's layout, with what rows leave to their trainer."""

    model: str
    sequence: int
    batch: int
    microbatch: int
    dtype: str
    cluster: str
    devices: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    shard: Literal["none", "zero1", "zero2", "zero3"] = "zero1"
    recompute: Recompute = "none"
    compiled: bool = True
    compiled_head: bool = True
    """torchtitan compiles blocks alone (``apply_compile``, December 2024), raypipe and Megatron fuse the loss too."""
    te: bool = False
    """TransformerEngine's kernels in another trainer: attention by cuDNN."""
    megatron: bool = False
    """Megatron's kernels: attention by cuDNN."""
    attention: tuple[float, float] = (1.0, 1.0)
    """Rates of the trainer's attention over those of the software's kernel, forward and backward."""
    masked: bool = False
    """Attention reads an explicit mask, and computes what it hides."""
    scattered: bool = True
    """With tensor parallelism, what lies between blocks' products is divided along sequences."""
    overlapped: bool = False
    """Collectives of tensor parallelism run beside its products."""
    float32_sums: bool = False
    """Gradients are summed in float32, over micro-batches too where weights stay gathered."""
    foreach: bool = False
    """The optimizer's operations are kernels of their own."""
    schedule: str = "1f1b"
    rounds: int = 1
    """Times that a step fills and drains the pipeline, each with its share of the micro-batches."""
    torch_pipeline: bool = False
    """``torch.distributed.pipelining`` moves tensors between stages."""
    between_gb_s: float | None = None
    """Bandwidth of a card between hosts, if another than the cluster file's."""
    innermost: Innermost = "stages"
    gather: Literal["unit", "microbatch"] = "unit"
    """With ``zero3``: whether weights stay gathered from one micro-batch to the next."""
    context: int = 1
    """Copies that divide each sequence, and FSDP's weights with the others."""
    experts: int = 1
    """Ranks that divide experts; with tensor parallelism, each of a group counts, as no expert is shared."""
    eager_rotary: bool = False
    """Queries and keys are rotated by eager kernels, whatever else is fused."""
    by_nccl: bool = False
    """Tokens go to experts by NCCL's all-to-all, a copy for each expert, and are sorted by expert at both ends."""
    consecutive: bool = False
    """AutoModel's ``FakeBalancedGate``: each token takes the k experts after those of the token before."""
    predicts_more: bool = False
    """A block and a second head predict one token more (DeepSeek-V3's multi-token prediction), as in Megatron."""
    balanced: bool = False
    """Stages as raypipe cuts them, by time; else blocks are dealt out evenly, as the rows' trainers do."""

    @property
    def replicas(self) -> int:
        """Data-parallel copies, those that divide sequences among them."""
        return self.devices // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        """Micro-batches of a copy, in each of its rounds."""
        return self.batch * self.context // (self.replicas * self.microbatch * self.rounds)


def layout(row: Row) -> Layout:
    """Return the layout of a row. What it does not say follows its trainer's defaults."""
    titan, note = row.source.startswith(TITAN), row.note
    megatron = "Megatron" in row.source or row.source.startswith("NeMo 24")
    whole = row.pipeline == 1 and row.sharded is not None
    # torchtitan's default: as many micro-batches as pipeline ranks.
    microbatch = row.microbatch or row.batch // (row.replicas * row.pipeline)
    result = Layout(
        model=row.model,
        sequence=row.sequence,
        batch=row.batch,
        microbatch=microbatch,
        dtype="fp8" if row.precision == "fp8" else "bfloat16-true",
        cluster="h100-96gb" if titan else "h100",
        devices=row.gpus,
        tensor=row.tensor,
        pipeline=row.pipeline,
        context=row.context,
        chunks=row.chunks,
        # FSDP divides weights where all blocks are on each device; with pipelines torchtitan keeps them gathered.
        shard="zero3" if whole else "none" if row.replicas == 1 else "zero1",
        # AutoModel runs PyTorch's eager kernels, and its plan would not fit without recomputation.
        recompute="selective"
        if "selective" in note
        else "full"
        if "full" in note or not (titan or megatron)
        else "none",
        compiled="compile" in note or megatron,
        compiled_head=not titan,
        megatron=megatron,
        # ``ub_tp_comm_overlap``: on in NeMo-Framework-Launcher's GPT-3 and in Megatron Bridge, off in its Llama 2.
        overlapped="async" in note or row.model.startswith("gpt3") or "Bridge" in row.source,
        float32_sums=titan,
        foreach=titan,
        schedule="1f1b",
        rounds=row.batch // (row.replicas * row.local_batch) if row.local_batch else 1,
        torch_pipeline=row.pipeline > 1 and not megatron,
    )
    if not row.experts and not (titan or megatron):
        # AutoModel runs transformers' model, whose norms each tensor rank computes (``sequence_parallel: false`` in
        # examples/llm_benchmark/llama3_3). In pipelines it makes masks beforehand (``create_causal_mask_mapping``),
        # which transformers 4.57 does not leave out where positions are given, as its mock data gives them.
        # Elsewhere weights are gathered for each micro-batch (``reshard_after_forward``): those of 70B fit no GPU.
        pipeline = row.pipeline > 1
        result = replace(result, scattered=False, masked=pipeline, attention=MASKED if pipeline else (1.0, 1.0))
        result = replace(result, gather="unit" if pipeline else "microbatch")
    if not row.experts:
        return result
    # AutoModel's and Megatron Bridge's recipes for mixtures have TransformerEngine's norms and attention, and copies of
    # a stage are neighbours. AutoModel's as of 89e3a9fdd (examples/benchmark/configs), which brought its performance
    # summary: all recompute, rotary embeddings are eager, and GPT-OSS has FlexAttention and eight ranks that divide
    # experts; its row says DeepEP, which has nothing to send without them, but gives no number. Megatron Bridge's for
    # GPT-OSS is the only one here that sends tokens by NCCL (moe_token_dispatcher_type of its provider).
    flexible = row.model.startswith("gpt-oss") and not megatron
    return replace(
        result,
        compiled=True,
        te=not flexible,
        experts=row.expert if megatron or row.expert > 1 else min(8, row.gpus),
        attention=FLEX if flexible else (1.0, 1.0),
        by_nccl=row.model.startswith("gpt-oss") and megatron,
        consecutive=not megatron,
        innermost="replicas",
        predicts_more=megatron and row.model == "deepseek-v3",
        eager_rotary=not megatron,
    )


def cluster_of(layout: Layout) -> ClusterSpec:
    """Return the cluster that a layout runs on."""
    result = load_cluster(f"cluster/devices/{layout.cluster}.yaml").resized(layout.devices)
    changes: dict[str, object] = {"software": "megatron" if layout.megatron or layout.te else "raypipe"}
    if layout.between_gb_s is not None:
        changes["between"] = result.between.model_copy(update={"bandwidth_gb_s": layout.between_gb_s})
    return result.model_copy(update=changes)


def sent(layout: Layout, work: LayerWork) -> float | None:
    """Return how often a token is sent by DeepEP: once to each host with experts of it, from where NVLink takes it on
    (deepseek-ai/DeepEP, README.md); inside one host, once to each rank."""
    own = work.experts
    if own is None or layout.experts == 1:
        return None
    if layout.by_nccl:
        return float(own.per_token)
    hosts = layout.experts // 8
    parts = hosts if hosts > 1 else layout.experts
    if layout.consecutive:
        return float(max(1, own.per_token * parts // own.experts))
    if hosts > 4 and layout.model == "deepseek-v3":  # topk_group: half of its eight groups, so four hosts at most
        return reached(own.experts // 2, own.per_token, 4)
    return reached(own.experts, own.per_token, parts)


def profile_of(layout: Layout, cluster: ClusterSpec, sizes: Sequence[int] = ()) -> Profile:
    """Return the profile of a layout's model, a layer for each block; ``sizes``: of micro-batches, if others."""
    layers = list(works(layout.model, layout.sequence))
    if layout.predicts_more:
        layers = [*layers[:-1], replace(layers[-2], name="block.more"), joined([layers[-1], layers[-1]])]
    # A backward of these trainers is a program of one block or of none, so that no weight gradient waits for all, and
    # Megatron's recipes recompute what products read.
    layers = [replace(work, operand_bytes=0.0, fused_operand_bytes=0.0) for work in layers]
    layers = [attending(work, layout.attention, layout.masked) for work in layers]
    if layout.eager_rotary:
        width = MODELS[layout.model].rotated
        layers = [rotated(work, width) if 0 < i < len(layers) - 1 else work for i, work in enumerate(layers)]
    if layout.model.startswith("gpt-oss"):
        layers = [biased(work, layout.megatron) for work in layers]
    layers = [
        checkpointed(
            work, layers[i - 1].output_bytes if i else 0.0, layout.recompute if 0 < i < len(layers) - 1 else "none"
        )
        for i, work in enumerate(layers)
    ]
    if layout.megatron:
        layers = [megatrons(work, head=work is layers[-1]) for work in layers]
    if layout.shard == "zero3":
        layers = list(map(gathered, layers))

    def made(compiled: bool) -> Profile:
        measured = sizes or [layout.microbatch]
        group = layout.experts // layout.tensor
        if layout.tensor == 1:
            own = [divided_experts(work, group, copies=sent(layout, work)) for work in layers]
            return analytic_profile(own, cluster, layout.dtype, measured, compiled=compiled).model_copy(
                update={"experts": group}
            )
        ranks = [divided(work, layout.tensor, not layout.megatron, layout.scattered) for work in layers]
        if layout.experts > 1:
            ranks = [
                rank._replace(work=divided_experts(rank.work, group, copies=sent(layout, rank.work))) for rank in ranks
            ]
        return tensor_profile(
            ranks, cluster, layout.dtype, layout.tensor, measured, compiled=compiled, overlapped=layout.overlapped
        ).model_copy(update={"experts": max(1, group)})

    result = made(layout.compiled)
    result = result.model_copy(
        update={"layers": tuple(layer.model_copy(update={"operand_bytes": None}) for layer in result.layers)}
    )
    if layout.compiled and not layout.compiled_head:
        result = result.model_copy(update={"layers": (*result.layers[:-1], made(False).layers[-1])})
    if layout.foreach:
        result = result.model_copy(
            update={
                "update_s_per_parameter": result.update_s_per_parameter * FOREACH / update_bytes("adamw", False, "fp8")
            }
        )
    if layout.context > 1:
        result = divided_sequences(result, layout.context)
    return with_reduce_dtype(result, "float32" if layout.float32_sums else None)


class GivenCut(Predictor):
    """Predicts with blocks dealt out evenly, as the rows' trainers do."""

    def cut(self, c: Candidate, form: Form | None = None) -> Cut:
        """Return the layers of each stage."""
        return even_cut(len(self.profile.layers), (c.form if form is None else form).stages)


@lru_cache
def even_cut(layers: int, stages: int) -> Cut:
    """Deal blocks out evenly; embedding and head go with the first and the last."""
    if stages > layers - 2:
        return tuple(range(i, i + 1) for i in range(layers))
    edges = [round(s * (layers - 2) / stages) + 1 for s in range(stages + 1)]
    edges[0], edges[-1] = 0, layers
    return tuple(range(a, b) for a, b in pairwise(edges))


def predict(layout: Layout) -> Prediction:
    """Predict the step and the memory of a layout."""
    cluster = cluster_of(layout)
    profile = profile_of(layout, cluster)
    grid = Grid(
        layout.pipeline,
        layout.replicas,
        layout.microbatch,
        layout.microbatches,
        layout.tensor,
        experts=max(1, layout.experts // layout.tensor),
        context=layout.context,
    )
    chunks, schedule = layout.chunks, layout.schedule
    if layout.pipeline == 1 and layout.shard == "zero3":  # one stage for each layer, as FSDP wraps them
        chunks, schedule = len(profile.layers), "interleaved-1f1b"
    elif chunks > 1:
        schedule = "interleaved-1f1b"
    how = {"shard": layout.shard, "gather": layout.gather, "update": "wait", "innermost": layout.innermost}
    c = Candidate.on(grid, schedule, chunks=chunks, **how)
    train = TrainSpec(steps=1, batch=layout.batch // layout.rounds, dtype=layout.dtype, clip=1.0)  # type: ignore[arg-type]
    judge = (Predictor if layout.balanced else GivenCut)(profile, train, len(profile.layers))
    result = judge.time(judge.predict(c, timed=True), final=True)
    more = (layout.rounds - 1) * result.compute_s  # sums and updates come once
    return replace(
        result,
        step_s=result.step_s + more,
        compute_s=result.compute_s + more,
        busy_s=result.busy_s * layout.rounds,
        batch=layout.batch,
    )


def chosen(asked: Layout, seconds: float) -> Decision:
    """Return what raypipe chooses for a layout's model, batch and devices, with its trainer's kernels, in so long."""
    cluster = cluster_of(asked)
    plain = replace(asked, recompute="none", shard="none", foreach=False, tensor=1, experts=1, context=1)
    sharing = [Sharing(tensor=n) for n in (2, 4, 8)]
    if any(work.experts for work in works(asked.model, asked.sequence)):
        sharing += [Sharing(experts=n) for n in (2, 4, 8, 16, 32, 64)]
    sizes = (1, 2, 4, 8)
    profile = profile_of(plain, cluster, sizes)
    shared = {
        way: profile_of(replace(plain, tensor=way.tensor, experts=way.experts), cluster, sizes)
        for way in sharing
        if max(way.tensor, way.experts) <= asked.devices
    }
    job = job_from({
        "name": asked.model, "data": {"type": "bytes", "path": "stdlib"}, "parallel": "auto",
        # Of the model, a choice reads no more than the number of layers.
        "model": {"layers": len(profile.layers) - 2, "hidden": 64, "heads": 8, "sequence": asked.sequence},
        "train": {"steps": 1, "batch": asked.batch, "dtype": asked.dtype, "clip": 1.0},
    })  # fmt: skip
    return choose(job, profile, top=1, search_s=0, shared=shared, watch=Watch(Budget(seconds)))


def tokens_per_gpu(layout: Layout, found: Prediction) -> float:
    """Return tokens per second and GPU."""
    return layout.batch * layout.sequence / found.step_s / layout.devices


def reserved_gib(asked: Layout, found: Prediction) -> float:
    """Return what PyTorch's allocator has reserved: the plan's tensors, workspaces of libraries, and its gaps."""
    device = found.memory[found.fullest]
    gaps = device.fragmentation / found.capacity * (device.planned - device.weights - device.optimizer)
    wider = device.gradients if asked.float32_sums and asked.pipeline > 1 else 0.0
    others = torch_buffers(asked, found) + side_streams(asked, found)
    return (device.planned + device.libraries + gaps + wider + others) / GIB


def side_streams(asked: Layout, found: Prediction) -> float:
    """Return what FSDP2 holds in memory of streams of its own, beside what is counted when a device is fullest.

    PyTorch's allocator gives a stream's memory to no other stream (torch's notes on CUDA semantics, "CUDA streams"), so
    what is there at another moment adds to the peak. The float32 sums that reduce-scatters leave are allocated on their
    stream (``foreach_reduce``), as many bytes as one of AdamW's three values a parameter. Gathered weights arrive in
    buffers of another one (``foreach_all_gather``), from which they are copied out: that of a block stays until the
    next block's has been (``FSDPCommContext.all_gather_state``). Where weights are divided all the time, gathers are in
    the plan's own memory. Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
    """
    if not asked.float32_sums:
        return 0.0
    device = found.memory[found.fullest]
    sums = device.optimizer / 3
    if asked.shard == "zero3":
        return max(0.0, sums - device.gradients)
    return sums + 2 * 2 * works(asked.model, asked.sequence)[1].parameters / asked.tensor


def torch_buffers(asked: Layout, found: Prediction) -> float:
    """Return what ``torch.distributed.pipelining`` holds beside messages on their way.

    From the start, a buffer for each activation and gradient that any micro-batch will receive
    (``_prepare_forward_infra``), and all stages' results to the end of the step (``output_chunks``, as of 2024).
    """
    if not asked.torch_pipeline:
        return 0.0
    stage, last = found.fullest, asked.pipeline - 1
    block = works(asked.model, asked.sequence)[1].output_bytes * asked.microbatch / asked.tensor
    received = (stage > 0 or asked.chunks > 1) + (stage < last or asked.chunks > 1)
    held = asked.chunks * asked.microbatches * block * (received + 1)
    return max(0.0, held - found.memory[found.fullest].messages)


def parts(found: Prediction) -> Sequence[float]:
    """Return seconds of a step: compute tasks, what devices idle among them, and what comes beside them."""
    return found.busy_s, found.compute_s - found.busy_s, found.step_s - found.compute_s
