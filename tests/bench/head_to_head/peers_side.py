"""DeepSpeed's and accelerate's sides as their users would write them, of one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from raypipe.data import Corpus
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers, cross_entropy
from tests.bench.head_to_head.rivals import Order, RankReport
from tests.bench.head_to_head.torch_side import adamw, whole_model


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over a micro-batch's targets, of which all micro-batches have equally many."""
    return cross_entropy(logits, targets) / targets.numel()


class Samples:
    """The micro-batches of this rank's share of every step, in order."""

    def __init__(self, order: Order, share: int, shares: int) -> None:
        self._job, self._corpus = order.job, Corpus.open(order.data)
        own = order.job.train.batch // shares
        self._firsts = range(share * own, (share + 1) * own, order.job.parallel.microbatch)

    def step(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and targets of a step's micro-batches."""
        t, size = self._job.train, self._job.parallel.microbatch
        for first in self._firsts:
            yield self._corpus.samples("train", t.seed, step, first, size, t.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in count():
            yield from self.step(step)

    def __len__(self) -> int:
        return len(self._firsts)


class Clock:
    """End, processor time and loss of each step of a block."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.begin = time.monotonic()

    def step(self, loss: float) -> None:
        """A step has ended."""
        self.losses.append(loss)
        self.ends.append(time.monotonic())
        self.cpu.append(time.process_time())

    def report(self) -> RankReport:
        """What this rank measured."""
        return RankReport(self.begin, self.ends, self.cpu, self.losses)


class StageModule(nn.Sequential):
    """One stage: the layers of raypipe's own cut."""

    def __init__(self, job: JobSpec, layers: range) -> None:
        model = GptLayers(job.model)
        super().__init__(*(model.build(i, job.train.seed) for i in layers))


def deepspeed_steps(order: Order) -> RankReport:
    """DeepSpeed: its pipeline engine, data parallelism, or ZeRO 3, whichever the job is."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # A kernel for its inference alone, which it would compile, in minutes, or wait for without end.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    run = deepspeed_pipeline if order.job.parallel.stages > 1 else deepspeed_copies
    return run(deepspeed, order)


def deepspeed_config(job: JobSpec) -> dict[str, Any]:
    """Return the configuration; like all contenders, torch's fused AdamW, no clipping, float32."""
    return {
        "train_batch_size": job.train.batch,
        "train_micro_batch_size_per_gpu": job.parallel.microbatch,
        "zero_optimization": {"stage": 3 if job.parallel.shard == "zero3" else 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }


def deepspeed_pipeline(deepspeed: Any, order: Order) -> RankReport:
    """Run DeepSpeed's 1F1B, with raypipe's cut: one layer of its module per stage."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    job = order.job
    samples, last = iter(Samples(order, 0, 1)), dist.get_rank() == dist.get_world_size() - 1
    layers = [LayerSpec(StageModule, job, layers) for layers in order.plan.cut]
    model = PipelineModule(layers, num_stages=len(layers), loss_fn=mean_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(job, model), config=deepspeed_config(job))
    dist.barrier()
    clock = Clock()
    for _ in range(order.steps):
        loss = float(engine.train_batch(samples))
        clock.step(loss if last else 0.0)
    engine.destroy()
    deepspeed.utils.groups.mpu = None  # it stays, and an engine without a pipeline would take its sizes
    return clock.report()


def deepspeed_copies(deepspeed: Any, order: Order) -> RankReport:
    """Run DeepSpeed without a pipeline: whole copies, or ZeRO 3."""
    job = order.job
    shares = dist.get_world_size()
    samples = Samples(order, dist.get_rank(), shares)
    model = whole_model(job)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(job, model), config=deepspeed_config(job))
    dist.barrier()
    clock = Clock()
    for step in range(order.steps):
        total = 0.0
        for tokens, targets in samples.step(step):
            loss = mean_loss(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(samples) / shares
        clock.step(total)
    engine.destroy()
    return clock.report()


def accelerate_steps(order: Order) -> RankReport:
    """Run accelerate: its data parallelism; on CPUs it has no FSDP, which it leaves out without a word."""
    from accelerate import Accelerator

    job = order.job
    shares = dist.get_world_size()
    samples = Samples(order, dist.get_rank(), shares)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(samples))
    model = whole_model(job)
    model, optimizer = accelerator.prepare(model, adamw(job, model))
    dist.barrier()
    clock = Clock()
    for step in range(order.steps):
        total = 0.0
        for tokens, targets in samples.step(step):
            with accelerator.accumulate(model):
                loss = mean_loss(model(tokens), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach()) / len(samples) / shares
        clock.step(total)
    accelerator.free_memory()
    return clock.report()
