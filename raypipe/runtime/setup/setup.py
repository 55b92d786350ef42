"""The message of the driver to a worker before the first step: plain data, a few kilobytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.checkpoint import Checkpoint
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel
from raypipe.models.task import Field
from raypipe.runtime.setup.communicators import Topology
from raypipe.runtime.setup.tensor_ranks import expert_ranks, rank_of
from raypipe.runtime.stage.shapes import StageIOSpecs
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import TiedHolders
from raypipe.schedule.ir import Sharding, StageGraph, Versions
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program
from raypipe.tensor import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything one worker needs; only ``device``, ``tensor_rank`` and the programs differ between workers."""

    device: int
    """Number of the device in the schedule."""
    tensor_rank: int
    """Tensor rank of the process within its device (``tensor_ranks``)."""
    job: JobSpec
    """The job; of its ``parallel`` section the plan's counts."""
    parallel: ParallelSpec
    """The plan's."""
    cut: tuple[tuple[int, ...], ...]
    """Per stage, the model layers it holds."""
    graph: StageGraph
    """Which stages talk."""
    placement: tuple[tuple[int, ...], ...]
    topology: Topology
    tied: tuple[TiedHolders, ...]
    samples_per_microbatch: int
    microbatches: int
    """Micro-batch ids of a step, over all replicas."""
    versions: Versions
    train: dict[Part, Program]
    """This device's step programs, by how a step begins and ends."""
    evaluate: Program
    data: Path
    """Folder of the prepared data."""
    fields: dict[str, Field] | None
    """Per prepared array, the shape of one sample and its dtype; None for text."""
    checkpoint: Path | Checkpoint | None
    """Where to read parameters and optimizer state from: a folder, or a copy in keepers' memory (``state.keeper``);
    None to start afresh."""
    sends_shards: bool = False
    """Whether the node does not share the run's directory, so that shards of checkpoints are sent to the driver."""
    slices: int = 1
    """Slices of a micro-batch along the sequence, each an id of its own."""
    recomputed: frozenset[int] | None = None
    """Layers that an R task recomputes; None for all of its stage."""
    sharding: Sharding | None = None
    """What the data-parallel copies of a stage divide; None: nothing."""
    samples: Any = None
    """The actor that streams samples (``samples.sample_stream``); None where they are read from ``data``."""
    done: int = 0
    """Number of steps done before."""
    left_out: int = 0
    """Mini-batches of training data that were left out before."""
    recovers: bool = False
    """Whether a device that dies is replaced in place (``recovery``)."""
    search_recompute: bool = False
    """Whether ``recomputed`` may change during the run; memory is then measured."""

    @property
    def tensor(self) -> int:
        """Number of tensor-parallel ranks of a device."""
        return self.parallel.tensor

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """Which share of the experts each replica holds."""
        return expert_ranks(len(self.placement), self.parallel.replicas, self.parallel.experts)

    @property
    def ranks(self) -> dict[Axis, int]:
        """This process's rank in each group over which layers are divided."""
        replica = next(r for r, devices in enumerate(self.placement) if self.device in devices)
        return {"tensor": self.tensor_rank, "experts": self.expert_ranks[replica]}

    @property
    def rank(self) -> int:
        """Rank of this process among all processes."""
        return rank_of(self.device, self.tensor_rank, self.tensor)


def io_specs_of(setup: Setup, plan: LayeredModel) -> StageIOSpecs:
    """Return the specs of what the stages exchange."""
    return StageIOSpecs(plan, setup.cut, setup.samples_per_microbatch, setup.graph, setup.placement[0])


def build_stage(setup: Setup, plan: LayeredModel, specs: StageIOSpecs, stage: int, device: torch.device) -> StageModule:
    """Build a stage of a device; its programs say whether its weight gradients are deferred."""
    split = any(a.task.kind == "W" for program in setup.train.values() for a in program.actions)
    return StageModule(
        plan,
        setup.cut[stage],
        setup.job.train.seed,
        device,
        split or setup.parallel.postpones,
        setup.recomputed,
        setup.search_recompute or setup.parallel.by_layer,
        specs.ends_of(stage),
        freed=setup.sharding is not None and setup.sharding.levels[stage] == 3,
    )
