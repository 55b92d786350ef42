"""The message of the driver to a worker before the first step: plain data, a few kilobytes.

Devices are mapped to tensor-parallel ranks: the processes of one device, each with a share of the same layers.
Schedules, programs and messages name devices. Tensor rank t of device d is the process of rank ``d * size + t``, so
that the ranks of a device, which communicate most, are neighbours. Between devices, only processes of the same tensor
rank communicate: every channel and every gradient all-reduce exists once per tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from raypipe.checkpoint import Checkpoint
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.models import LayeredModel
from raypipe.models.task import Field
from raypipe.runtime.setup.communicators import Topology
from raypipe.runtime.stage.shapes import StageIOSpecs
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import TiedHolders
from raypipe.schedule.ir import Sharding, StageGraph, Versions
from raypipe.schedule.lowering.asynchronous import Part
from raypipe.schedule.lowering.programs import Program
from raypipe.schedule.microbatch_order import Copies
from raypipe.schedule.sharding import CONTEXT_GROUP, EXPERT_GROUP, copy_ranks
from raypipe.tensor import Axis

T = TypeVar("T")

TENSOR_GROUP = "tensor"
"""Key, in what ``own_groups`` returns, of the group of one device's tensor-parallel ranks."""


def rank_of(device: int, tensor_rank: int, size: int) -> int:
    """Return the rank of a device's process, where devices have ``size`` tensor ranks."""
    return device * size + tensor_rank


def tensor_rank_of(rank: int, size: int) -> tuple[int, int]:
    """Return (device, tensor rank) of a process."""
    return divmod(rank, size)


def tensor_rank_edges(edges: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """Turn directed edges between devices into edges between processes."""
    return tuple((rank_of(a, m, size), rank_of(b, m, size)) for a, b in edges for m in range(size))


def tensor_rank_groups(groups: Mapping[str, tuple[int, ...]], devices: int, size: int) -> dict[str, tuple[int, ...]]:
    """Turn groups of devices into groups of processes, one per tensor rank, and add each device's tensor group."""
    if size == 1:
        return dict(groups)
    result = {
        f"{name}, tensor rank {m}": tuple(rank_of(d, m, size) for d in ranks)
        for name, ranks in groups.items()
        for m in range(size)
    }
    for device in range(devices):
        result[f"{TENSOR_GROUP} {device}"] = tuple(rank_of(device, m, size) for m in range(size))
    return result


def own_groups(
    groups: Mapping[str, T],
    device: int,
    tensor_rank: int,
    size: int,
    served_by: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, T]:
    """Select a process's own groups by their device-level names; that of its device, and those with which it divides
    experts or sequences, by ``TENSOR_GROUP``, ``EXPERT_GROUP`` and ``CONTEXT_GROUP``.

    ``served_by``: see ``served_by_another``.
    """
    result = dict(groups)
    if size > 1:
        suffix = f", tensor rank {tensor_rank}"
        result = {name.removesuffix(suffix): group for name, group in groups.items() if name.endswith(suffix)}
        result[TENSOR_GROUP] = groups[f"{TENSOR_GROUP} {device}"]
    result |= {name: result[one] for name, one in served_by.items() if one in result}
    kinds = (EXPERT_GROUP, CONTEXT_GROUP)
    return {next((k for k in kinds if name.startswith(f"{k} ")), name): group for name, group in result.items()}


def own_channels(channels: Mapping[int, T], size: int) -> dict[int, T]:
    """Index a process's channels by the device, instead of the rank, at the other end."""
    return {tensor_rank_of(rank, size)[0]: channel for rank, channel in channels.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything one worker needs; only ``device``, ``tensor_rank`` and the programs differ between workers."""

    device: int
    """Number of the device in the schedule."""
    tensor_rank: int
    """Tensor rank of the process within its device."""
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
    """Where to read parameters and optimizer state from: a folder, or a copy in keepers' memory (``shard_writer``);
    None to start afresh."""
    place: Any = None
    """Where it runs, as ``hosts.reserve.Kept`` has it: if its driver dies, the next one asks."""
    sends_shards: bool = False
    """Whether the node does not share the run's directory, so that shards of checkpoints are sent to the driver."""
    slices: int = 1
    """Slices of a micro-batch along the sequence, each an id of its own."""
    recomputed: frozenset[int] | None = None
    """Layers that an R task recomputes; None for all of its stage."""
    sharding: Sharding | None = None
    """What the data-parallel copies of a stage divide; None: nothing."""
    samples: Any = None
    """The actor that streams samples (``worker.samples``); None where they are read from ``data``."""
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
        return copy_ranks(len(self.placement), self.parallel.replicas, self.parallel.experts)

    @property
    def ranks(self) -> dict[Axis, int]:
        """This process's rank in each group over which layers are divided."""
        replica = next(r for r, devices in enumerate(self.placement) if self.device in devices)
        parts = copy_ranks(len(self.placement), self.parallel.replicas, self.parallel.context)
        return {"tensor": self.tensor_rank, "experts": self.expert_ranks[replica], "context": parts[replica]}

    @property
    def copies(self) -> Copies:
        """Which micro-batches of the data the copies take."""
        return Copies(self.microbatches // self.slices // self.parallel.replicas, self.parallel.context)

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
