"""The actor that a profile is measured with: a stage actor that times single layers, links and collectives."""

from __future__ import annotations

import gc
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data import is_prepared, prepare_data
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.models.build import Fields
from raypipe.profiling.effort import Effort
from raypipe.profiling.profiled_steps import Samples, middle_look
from raypipe.runtime.allocated import PeakMeter, allocated_bytes, process_bytes
from raypipe.runtime.communicators import Communicators, Topology
from raypipe.runtime.setup import Setup
from raypipe.runtime.transport.channel import Expected, Label, TensorSpec
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.runtime.worker import StageWorker
from raypipe.schedule.ir import Task
from raypipe.schedule.lowering.programs import Action, Program

LOOKS, LOOKING_S = 5, 0.2
"""Steps in which memory is looked at, at most; and seconds of this thread after which none is begun. Where a step takes
longer, the few kilobytes of other threads are nothing beside what layers keep."""
WORK_S = 0.005
"""Seconds that a CPU device computes before each message and collective that is timed."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device says of itself."""

    name: str
    memory_bytes: float
    """All of its memory; of a CPU device, its host's."""
    base_bytes: float
    """What its process takes before it holds a parameter."""
    node: str


class MadeUp:
    """Both ends of a channel to a device that does not exist: swallows what is sent, makes up what is received."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._specs: dict[Label, tuple[TensorSpec, ...]] = {}
        self._patterns: dict[TensorSpec, Tensor] = {}

    def post(self, expected: Sequence[Expected]) -> None:
        """Note what will be asked for."""
        self._specs |= {one.label: one.tensors for one in expected}

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """Fresh tensors, as a message brings them."""
        return [self._pattern(spec).clone() for spec in self._specs.pop(label)]

    def _pattern(self, spec: TensorSpec) -> Tensor:
        if spec not in self._patterns:
            made = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            self._patterns[spec] = made.normal_() if made.is_floating_point() else made
        return self._patterns[spec]

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """Nobody is there."""

    @property
    def pending(self) -> bool:
        """Never."""
        return False

    def progress(self) -> None:
        """Nothing is left."""

    def flush(self, timeout_s: float) -> None:
        """Nothing is left."""

    def close(self) -> None:
        """Nothing is held."""


class ProfilingStage(StageWorker):
    """One device being measured."""

    def __init__(self, rank: int, title: str) -> None:
        super().__init__(rank, title)
        self._base_bytes: float | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The data, on a host that does not have it."""

    def facts(self, job: JobSpec, fields: Fields | None) -> DeviceFacts:
        """Name and memory. Its process has the code of the job's model loaded, and a captured one's graph in memory."""
        if self._base_bytes is None:  # at the first call, before it holds anything
            self._described = build_model(job, fields)
            self._base_bytes = process_bytes(self.device)
            gc.collect()
            self._in_use = allocated_bytes(self.device)
        base, node = self._base_bytes, self.locate().peer.node
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            return DeviceFacts(properties.name, float(properties.total_memory), base, node)
        return DeviceFacts(_processor(), _host_memory(), base, node)

    def left_behind_bytes(self) -> int:
        """What is in use beyond the base, now that no layer is held: oneDNN keeps the code that it makes for each shape
        of a product, half a megabyte each in bfloat16."""
        self._leave()
        gc.unfreeze()  # setup froze what it built, and some of that refers to itself
        gc.collect()
        return max(0, allocated_bytes(self.device) - self._in_use)

    def hold(self, setup: Setup) -> dict[str, int]:
        """Build the measured layers; the rest of the model is on a device that does not exist.

        Returns how many values each of their parameters has, by name.
        """
        if not is_prepared(setup.data):  # another host's temporary folder
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="raypipe-profile-")
            own = Path(self._folder.name)
            if not is_prepared(own):
                prepare_data(setup.job, build_model(setup.job, setup.fields).task, own)
            setup = replace(setup, data=own)
        self.setup(setup)
        elsewhere = MadeUp(self.device)
        self.executor.senders = {1: elsewhere}
        self.executor.receivers = {1: elsewhere}
        return {name: p.numel() for module in self.modules.values() for name, p in module.named.items()}

    def clear(self) -> None:
        """Remove what is on disk: this process is killed, and cleans nothing up then."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run_layers(self, program: Program, warm_up: int, effort: Effort, memory: bool) -> Samples:
        """Run a step again and again, and look at its ``memory``; ``effort`` says how often."""
        train = self.setup_data.job.train
        plain = type(self.executor).run_task
        in_use: list[tuple[int, int]] = []
        peaks: list[int] = []
        looks: list[NDArray[np.int64]] = []
        ran: list[float] = []
        own_clock = time.thread_time if self.device.type == "cpu" else lambda: math.nan

        def timed(action: Action) -> None:
            before = own_clock()
            plain(self.executor, action)  # the runner's clock knows when a GPU was through
            ran.append(own_clock() - before)

        def metered(action: Action) -> None:
            before = allocated_bytes(self.device)
            plain(self.executor, action)
            in_use.append((before, allocated_bytes(self.device)))

        def peaking(action: Action) -> None:
            with PeakMeter(self.device) as meter:
                plain(self.executor, action)
            peaks.append(meter.peak - meter.before)

        number = itertools.count()

        def step(run_task: Callable[[Action], None]) -> NDArray[np.float64]:
            self.executor.run_task = run_task  # type: ignore[method-assign, assignment]
            n = next(number)
            return self.executor.run(program, n, learning_rate(train, n)).times

        for _ in range(warm_up):
            step(timed)
        if memory:
            gc.collect()
            gc.disable()  # else what an earlier step left in cycles is given back in the middle of a task
            began = time.thread_time()
            while len(looks) < LOOKS and (not looks or time.thread_time() - began < LOOKING_S):
                in_use.clear()
                peaks.clear()
                step(metered)
                step(peaking)  # apart: the meter's own traces are freed late
                looks.append(np.array([(a, a + peak, b) for (a, b), peak in zip(in_use, peaks, strict=True)]))
            gc.enable()
        times: list[NDArray[np.float64]] = []
        ran.clear()
        until = time.monotonic() + effort.budget_s
        while len(times) < effort.least or (len(times) < effort.most and time.monotonic() < until):
            times.append(step(timed))
        order: tuple[Task, ...] = tuple(action.task for action in program.actions)
        return Samples(order, np.stack(times), np.array(ran).reshape(len(times), -1), middle_look(looks))

    def connect(self, topology: Topology) -> None:
        """Join the groups and open the channels that are measured next."""
        self._leave()
        self.communicators = Communicators(self.rank, topology, self._backend(topology))

    def message_seconds(self, other: int, first: bool, sizes: Sequence[int], repeats: int) -> list[list[float]]:
        """Half of the time that a message takes to ``other`` and back, by size in bytes; every repeat.

        ``first``: this end begins.
        """
        sender, receiver = self.communicators.senders[other], self.communicators.receivers[other]
        found: list[list[float]] = []
        for k, size in enumerate(sizes):
            spec = TensorSpec((max(1, size // 4),), torch.float32)
            payload = [torch.ones(spec.shape, dtype=spec.dtype, device=self.device)]
            labels = [Label("act", 0, 1, n, k) for n in range(repeats)]
            receiver.post([Expected(label, (spec,)) for label in labels])
            times = []
            for label in labels:
                if first:
                    self._work()
                start = time.monotonic()
                if first:
                    sender.send(label, payload)
                    sender.flush(60.0)
                receiver.recv(label, 60.0)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                times.append((time.monotonic() - start) / 2)
                if not first:
                    sender.send(label, payload)
                    sender.flush(60.0)
            found.append(times)
        return found

    def collective_seconds(self, kind: str, group: str, sizes: Sequence[int], repeats: int) -> list[list[float]]:
        """Time of a collective, by bytes of its whole buffer; every repeat. Empty where this device takes no part."""
        tensor_ranks = self.communicators.groups.get(group)
        if tensor_ranks is None:
            return []
        count = tensor_ranks.size()
        # Named anew in torch 2.13; what they do is the same.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        found: list[list[float]] = []
        for size in sizes:
            whole = torch.ones(max(1, size // 4 // count) * count, device=self.device)
            part = whole[: len(whole) // count].clone()
            times = []
            for _ in range(repeats + 1):
                self._work()
                dist.barrier(group=tensor_ranks)
                start = time.monotonic()
                if kind == "all_reduce":
                    dist.all_reduce(whole, group=tensor_ranks)
                elif kind == "all_gather":
                    all_gather(whole, part, group=tensor_ranks)
                else:
                    reduce_scatter(part, whole, group=tensor_ranks)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                times.append(time.monotonic() - start)
            found.append(times[1:])
        return found

    def _work(self) -> None:
        """Compute for a moment, as a device has done when it sends.

        Threads that sleep meanwhile take longer to wake than in a loop of nothing but messages, on a busy host
        milliseconds now and then: means of such times are what steps are made of. Kernels of a GPU leave the host idle.
        """
        if self.device.type == "cuda":
            return
        matrix, until = torch.ones(256, 256), time.monotonic() + WORK_S
        while time.monotonic() < until:
            matrix @ matrix


def _processor() -> str:
    """The processor's model name."""
    with open("/proc/cpuinfo") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, one core"


def _host_memory() -> float:
    """Bytes of memory of this host, or what a container is given of it."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, float(text))
    return total
