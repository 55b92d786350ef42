"""The rivals that need no pipeline: one process, DistributedDataParallel, FSDP2. Each as its users would write it."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from raypipe.data import Corpus
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers, cross_entropy
from tests.bench.head_to_head.blocks import Order, RankReport


def adamw(job: JobSpec, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer all contenders use: AdamW with the job's values, fused."""
    t = job.train
    return torch.optim.AdamW(
        module.parameters(), lr=t.lr, betas=t.betas, eps=t.eps, weight_decay=t.weight_decay, fused=True
    )


def whole_model(job: JobSpec) -> nn.Sequential:
    """All layers, with the start weights every contender has."""
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
