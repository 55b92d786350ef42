"""torch's side as its users would write it: one process, DistributedDataParallel, FSDP2, its pipelining."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from raypipe.data import Corpus
from raypipe.job.model_spec import HfSpec
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers, cross_entropy
from raypipe.plan.plan import build_schedule
from raypipe.schedule.forms.text import to_torch_csv
from raypipe.schedule.ir import Schedule
from tests.bench.head_to_head.rivals import Order, RankReport


def adamw(job: JobSpec, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer all contenders use: AdamW with the job's values, fused."""
    t = job.train
    return torch.optim.AdamW(
        module.parameters(), lr=t.lr, betas=t.betas, eps=t.eps, weight_decay=t.weight_decay, fused=True
    )


class Logits(nn.Module):
    """A transformers model as what gives logits for tokens; its parts to shard are its layers."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.train()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.model.model.layers)


def whole_model(job: JobSpec) -> Any:
    """All layers, with the start weights every contender has."""
    if isinstance(job.model, HfSpec):
        return Logits(job.model.hf)
    plan = GptLayers(job.model)
    return nn.Sequential(*(plan.build(i, job.train.seed) for i in range(plan.count)))


def accumulate_steps(order: Order) -> RankReport:
    """One process: the whole mini-batch at once, or gradients accumulated over the micro-batches."""
    model = whole_model(order.job)
    return _steps(order, model, share=0, shares=1)


def data_parallel_steps(order: Order) -> RankReport:
    """DistributedDataParallel: each rank takes its share of the mini-batch; gradients are reduced once a step."""
    model = DistributedDataParallel(whole_model(order.job), gradient_as_bucket_view=True)
    dist.barrier()
    return _steps(order, model, dist.get_rank(), dist.get_world_size())


def sharded_steps(order: Order) -> RankReport:
    """FSDP2: each rank keeps half of every layer, which is gathered for its forward and again for its backward.

    Gradients are reduced once a step, as for DistributedDataParallel.
    """
    model = whole_model(order.job)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    dist.barrier()
    return _steps(order, model, dist.get_rank(), dist.get_world_size())


class Exchange(torch.autograd.Function):
    """Rows sent to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, into: list[int], out: list[int]) -> Tensor:
        ctx.sizes = into, out
        arrived = rows.new_empty(sum(into), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), into, out)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        into, out = ctx.sizes
        back = gradient.new_empty(sum(out), *gradient.shape[1:])
        dist.all_to_all_single(back, gradient.contiguous(), out, into)
        return back, None, None


class DividedExperts(nn.Module):
    """This rank's part of a layer's experts: rows are sent to the ranks that hold their experts, and back."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.held = experts.num_experts // ranks
        own = slice(rank * self.held, (rank + 1) * self.held)
        for name in ("gate_up_proj", "down_proj"):
            weight = nn.Parameter(getattr(experts, name).detach()[own].clone())
            weight.register_hook(
                lambda grad: grad / ranks
            )  # of the sum over all ranks' losses, which _steps multiplies
            setattr(experts, name, weight)
        experts.num_experts = self.held
        self.experts = experts

    def forward(self, rows: Tensor, top: Tensor, weights: Tensor) -> Tensor:
        order = top.flatten().argsort(stable=True)
        which = top.flatten()[order]
        ranks = dist.get_world_size()
        sent = torch.bincount(which // self.held, minlength=ranks)
        come = torch.empty_like(sent)
        dist.all_to_all_single(come, sent)
        out, into = sent.tolist(), come.tolist()
        local = torch.empty(sum(into), dtype=which.dtype)
        dist.all_to_all_single(local, which % self.held, into, out)
        arrived = Exchange.apply(rows[order // top.shape[1]], into, out)
        done = self.experts(arrived, local[:, None], arrived.new_ones(len(local), 1))
        back = Exchange.apply(done, out, into)
        return torch.zeros_like(rows).index_add(0, order // top.shape[1], back * weights.flatten()[order, None])


def divided_experts_steps(order: Order) -> RankReport:
    """Divide each layer's experts over the ranks by torch's all-to-all; DistributedDataParallel holds the rest."""
    model = whole_model(order.job)
    for layer in model:
        layer.mlp.experts = DividedExperts(layer.mlp.experts)
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    dist.barrier()
    return _steps(order, parallel, dist.get_rank(), dist.get_world_size())


def _steps(order: Order, model: nn.Module, share: int, shares: int) -> RankReport:
    job = order.job
    batch, seed = job.train.batch, job.train.seed
    optimizer = adamw(job, model)
    corpus = Corpus.open(order.data)
    tokens_per_batch = batch * job.model.sequence
    own = batch // shares
    size = own if order.whole else job.parallel.microbatch
    firsts = range(share * own, (share + 1) * own, size)
    ends, cpu, losses = [], [], []
    begin = time.monotonic()
    for step in range(order.steps):
        total = torch.zeros(())
        for first in firsts:
            tokens, targets = corpus.samples("train", seed, step, first, size, batch)
            more = first != firsts[-1] and isinstance(model, DistributedDataParallel)
            with model.no_sync() if more else nullcontext():
                loss = cross_entropy(model(tokens), targets) / tokens_per_batch
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(first == firsts[-1])
                (loss * shares).backward()  # DistributedDataParallel and FSDP2 take the mean over the ranks
            total += loss.detach()
        optimizer.step()
        # DistributedDataParallel's gradients are views of its buckets: keeping them saves a copy.
        optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
        losses.append(float(total))
        ends.append(time.monotonic())
        cpu.append(time.process_time())
    return RankReport(begin, ends, cpu, losses)


# torch.distributed.pipelining on raypipe's own cut, weights, data and optimizer: one rank's side of a block.

CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
"""torch's own class for a schedule. What has none runs in torch's general runtime, from the order raypipe exports."""


def make_schedule(name: str, ours: Schedule, stages: list[PipelineStage], count: int, loss: Any) -> Any:
    """torch's schedule object over this rank's stages.

    Gradients are not scaled afterwards: the loss is divided by the mini-batch's tokens, as raypipe's is, which
    spares torch a pass over its gradients.
    """
    kind = CLASSES.get(name)
    if kind in (ScheduleGPipe, Schedule1F1B):
        return kind(stages[0], count, loss_fn=loss, scale_grads=False)
    if kind is not None:
        return kind(stages, count, loss_fn=loss, scale_grads=False)
    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        path.write_text(to_torch_csv(ours))
        runtime._load_csv(str(path))
    return runtime


class Trace:
    """Notes the tasks one step really runs: torch's own listing of its 1F1B order is wrong about the last stage."""

    def __init__(self, stages: list[PipelineStage]) -> None:
        self.stages = stages
        self.tasks: list[str] = []
        for stage in stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, self._noting(stage, method))

    def _noting(self, stage: PipelineStage, method: str) -> Any:
        plain = getattr(stage, method)

        def noting(index: int, *args: Any, **named: Any) -> Any:
            letter = {"forward_one_chunk": "F", "backward_weight_one_chunk": "W"}.get(method)
            letter = letter or ("B" if named.get("full_backward", True) else "I")
            self.tasks.append(f"{stage.stage_index}{letter}{index}")
            return plain(index, *args, **named)

        return noting

    def stop(self) -> list[str]:
        """The tasks so far, in torch's letters; the stages run unwatched from here on."""
        for stage in self.stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                delattr(stage, method)
        return self.tasks


def pipeline_steps(order: Order) -> RankReport:
    """Run a block of steps on this rank."""
    job, rank = order.job, dist.get_rank()
    plan = GptLayers(job.model)
    ours = build_schedule(order.plan, job.train.batch)
    held = [stage for stage, device in enumerate(ours.placement[0]) if device == rank]
    tokens_per_batch = job.train.batch * job.model.sequence
    modules = nn.ModuleList(
        nn.Sequential(*(plan.build(i, job.train.seed) for i in order.plan.cut[stage])) for stage in held
    )
    stages = [
        PipelineStage(module, stage, ours.stages, torch.device("cpu"))
        for stage, module in zip(held, modules, strict=True)
    ]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / tokens_per_batch

    schedule = make_schedule(ours.name, ours, stages, ours.microbatches, loss)
    optimizer = adamw(job, modules)
    corpus = Corpus.open(order.data)
    first, last = 0 in held, ours.stages - 1 in held
    dist.barrier()
    ends, cpu, losses = [], [], []
    trace, ran = Trace(stages), []
    begin = time.monotonic()
    for step in range(order.steps):
        parts: list[Tensor] = []
        if first or last:
            tokens, targets = corpus.batch("train", job.train.seed, step, job.train.batch)
        inputs = (tokens,) if first else ()
        if last:
            schedule.step(*inputs, target=targets, losses=parts, return_outputs=False)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            ran = trace.stop()
        losses.append(float(torch.stack(parts).detach().sum()) if parts else 0.0)
        ends.append(time.monotonic())
        cpu.append(time.process_time())
    same = ran == to_torch_csv(ours).splitlines()[rank].split(",")
    return RankReport(begin, ends, cpu, losses, same)
