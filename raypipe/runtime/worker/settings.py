"""Derive from a worker's setup the settings of a step, how gradients and norms are summed, and what is profiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from raypipe.job.spec import reduce_dtype
from raypipe.job.train_spec import ProfileSpec
from raypipe.models.host_copies import runs_behind
from raypipe.partition.this_machine import host_memory_bytes
from raypipe.plan.online.tune_first_k import FirstKTuner
from raypipe.runtime.executor.casts import message_cast_of
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.executor.step import StepSettings
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.transport.process_groups import create_groups
from raypipe.runtime.update.norm import DeviceShares, Shares
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.lowering.programs import Action


def step_settings(setup: Setup, device: torch.device, batch_statistics: bool, divides: bool) -> StepSettings:
    """Return the settings of a device's steps.

    Args:
        setup: that of the device's worker.
        device: what it computes on.
        batch_statistics: whether layers keep running statistics of the samples.
        divides: whether data-parallel copies divide a stage of this device.
    """
    job, parallel = setup.job, setup.parallel
    # An update that has to be undone is noticed by each process when it looks; members must do so in step.
    # The same holds for those that divide a stage: a step begun again gathers it again, on all of them.
    # And running statistics that an update has moved cannot be taken back.
    skips = job.train.on_nonfinite == "skip"
    together = (
        setup.tensor > 1
        or max(parallel.experts, parallel.context) > 1
        or divides
        or ((setup.recovers or skips) and batch_statistics)
    )
    update: RequestedNormPolicy = "wait" if together else parallel.update
    return StepSettings(
        seed=job.train.seed,
        microbatches=setup.microbatches,
        samples_per_microbatch=setup.samples_per_microbatch,
        slices=setup.slices,
        clip=job.train.clip,
        skips=skips,
        update=update,
        timeout_s=job.train.message_timeout_s,
        device=device,
        autocast=torch.bfloat16 if job.train.dtype == "bfloat16" else None,
        tensor_rank=setup.tensor_rank,
        by_layer=parallel.by_layer,
        side_stream=parallel.side_stream,
        sub_pipelined=parallel.sub_pipelined,
        pairs=parallel.experts > 1,
        message_cast=message_cast_of(job, parallel),
    )


def norm_shares(
    setup: Setup, device: torch.device, world: dist.ProcessGroup | None, backend: str
) -> Shares | DeviceShares:
    """Return what exchanges the shares of the gradient norm.

    ``world``: None if every device knows the norm by itself; ``backend``: of the process groups.
    """
    if not runs_behind(device):
        return Shares(world)
    if world is None or not setup.job.train.needs_norm:
        return DeviceShares(None)
    if backend == "gloo":  # several workers share a GPU, so their hosts have to tell
        return Shares(world)
    every = {"gradient norm": tuple(range(world.size()))}
    return DeviceShares(create_groups(every, "nccl", setup.topology.timeout_s)["gradient norm"])


def dtype_of_sums(setup: Setup) -> torch.dtype | None:
    """Return the dtype in which gradients are summed; None for their own."""
    name = reduce_dtype(setup.job.train, setup.parallel)
    result: torch.dtype | None = None if name is None else getattr(torch, name)
    return result


def first_k_tuner(setup: Setup, device: torch.device) -> Callable[[int], FirstKTuner] | None:
    """Return what makes, for a stage of so many layers, the tuner of its k: within the memory that the job gives a
    device, or where k is to be chosen, within its share of the host's. None without reverse first-k."""
    given = setup.parallel
    if not given.postpones:
        return None
    memory = None
    if given.memory_cap_mb is not None:
        memory = given.memory_cap_mb * 2**20
    elif given.first_k is None and device.type == "cpu":
        node = setup.topology.peers[setup.rank].node
        memory = host_memory_bytes() / sum(peer.node == node for peer in setup.topology.peers)
    return partial(FirstKTuner, fixed=given.first_k, memory=memory)


FOLDER = "profiles"
"""Folder of the run's directory that gets a trace per worker."""


class ProfilerWindow:
    """Profiles a worker's steps ``start_step`` to ``start_step + steps - 1`` and writes a Chrome trace.

    Every task of the schedule is a span of the trace, by its name, such as ``1F0``.

    Args:
        spec: which steps; None for none.
        folder: the run's folder of traces.
        rank: the worker's.
        device: its device.
    """

    def __init__(self, spec: ProfileSpec | None, folder: Path, rank: int, device: torch.device) -> None:
        self._spec, self._folder, self._rank, self._device = spec, folder, rank, device
        self._profiler: Any = None

    def begin(self, step: int, executor: Any) -> None:
        """Start where ``step``, counted from 1, is in the window and nothing is profiled yet."""
        spec = self._spec
        if spec is None or self._profiler is not None or not 0 <= step - spec.start_step < spec.steps:
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._first = step
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.start()
        self._plain = executor.handlers
        executor.surround(_named)

    def end(self, step: int, executor: Any) -> None:
        """Stop, and write the trace, where ``step`` is the last of the window."""
        if self._profiler is None or self._spec is None or step < self._spec.start_step + self._spec.steps - 1:
            return
        profiler, self._profiler = self._profiler, None
        executor.handlers = self._plain
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / f"steps-{self._first}-{step}-rank-{self._rank}.json.gz"))


def _named(handler: Handler) -> Handler:
    def run(executor: Any, action: Action) -> None:
        with record_function(str(action.task)):
            handler(executor, action)

    return run
