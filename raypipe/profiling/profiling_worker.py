"""The worker that measures a profile: it times single layers, messages and collectives."""

from __future__ import annotations

import gc
import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from raypipe.compat.torch_private import TorchDispatchMode
from raypipe.data import is_prepared, prepare_data
from raypipe.graph.subgraph_work import GROUPED
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.models.build import Fields
from raypipe.partition.this_machine import host_memory_bytes
from raypipe.profiling.effort import Effort
from raypipe.profiling.profiled_steps import Samples, middle_look
from raypipe.runtime.executor.executor import HANDLERS, Executor
from raypipe.runtime.executor.runner import Handler
from raypipe.runtime.graphs.device_graphs import capture_stream
from raypipe.runtime.process.memory import PeakMeter, allocated_bytes, resident_bytes, taken_beside_tensors
from raypipe.runtime.process.set_up import give_back_memory
from raypipe.runtime.recovery.failure import raises_device_errors
from raypipe.runtime.setup.communicators import Communicators, Topology
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.transport.channel import Expected, Label, Sender, TensorSpec
from raypipe.runtime.update.collectives import start_all_gather, start_reduce_scatter
from raypipe.runtime.update.optimizer import learning_rate, untraced
from raypipe.runtime.update.side_stream import make_stream
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.ir import Task
from raypipe.schedule.lowering.programs import Action, Program

LOOKS, LOOKING_S = 5, 0.2
"""Largest number of steps in which memory is measured, and the CPU seconds after which no further one begins. Where
steps take longer, the few kilobytes that other threads allocate are negligible beside what layers keep."""
WORK_S = 0.005
"""Seconds that a CPU device computes before each timed message and collective."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The name and the memory of a device."""

    name: str
    memory_bytes: float
    """Memory of the device; for a CPU device, that of its host."""
    base_bytes: float
    """Memory that the process uses before it holds any parameter."""
    node: str


class FakeChannel:
    """Sender and receiver to a device that does not exist: drops what is sent, and makes up what is received."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._specs: dict[Label, tuple[TensorSpec, ...]] = {}
        self._patterns: dict[TensorSpec, Tensor] = {}

    def post(self, expected: Sequence[Expected]) -> None:
        """Remember the specs of expected messages."""
        self._specs |= {one.label: one.tensors for one in expected}

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """Return new tensors, as receiving a message does."""
        return [self._pattern(spec).clone() for spec in self._specs.pop(label)]

    def _pattern(self, spec: TensorSpec) -> Tensor:
        if spec not in self._patterns:
            made = torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            self._patterns[spec] = made.normal_() if made.is_floating_point() else made
        return self._patterns[spec]

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """Drop the message."""

    @property
    def pending(self) -> bool:
        """Return whether messages are unsent, which is never so."""
        return False

    def progress(self) -> None:
        """Do nothing, because no message is pending."""

    def flush(self, timeout_s: float) -> None:
        """Do nothing, because no message is pending."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""


class _GroupedRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices how many rows each expert has in the first grouped product that runs."""

    rows: Sequence[int] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.rows and func.name().rpartition("::")[2].partition(".")[0] in GROUPED:
            ends = next(x for x in (*args[2:], *(kwargs or {}).values()) if isinstance(x, Tensor))
            self.rows = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return func(*args, **(kwargs or {}))


class StageProfiler(StageWorker):
    """A worker that measures its device, and may then ``become`` one of the run on it."""

    reads_whole = False

    def __init__(self, rank: int, title: str) -> None:
        super().__init__(rank, title)
        self._base_bytes: float | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Folder of the prepared data, on a host that does not share the driver's."""

    def become(self, rank: int, title: str) -> None:
        """Be the worker of a rank from now on, with nothing left of what was measured."""
        self._leave()
        self.__dict__.pop("_described", None)
        self.reads_whole = True  # type: ignore[misc]
        super().become(rank, title)
        gc.unfreeze()
        gc.collect()
        give_back_memory(self.device)

    @raises_device_errors
    def facts(self, job: JobSpec, fields: Fields | None) -> DeviceFacts:
        """Return the device's name and memory; base memory includes the model's code and captured graph."""
        if self._base_bytes is None:  # at the first call, before any parameter is built
            self._described = build_model(job, fields)
            self._base_bytes = process_bytes(self.device, job)
            gc.collect()
            self._in_use = allocated_bytes(self.device)
        base, node = self._base_bytes, self.locate().peer.node
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            return DeviceFacts(properties.name, float(properties.total_memory), base, node)
        return DeviceFacts(_processor(), host_memory_bytes(), base, node)

    def left_behind_bytes(self) -> int:
        """Drop all layers, and return the bytes that are still in use beyond the base.

        oneDNN keeps the code that it generates for each shape of a product, half a megabyte each in bfloat16.
        """
        self._leave()
        gc.unfreeze()  # setup froze its objects, and some of them are in reference cycles
        gc.collect()
        return max(0, allocated_bytes(self.device) - self._in_use)

    @raises_device_errors
    def hold(self, setup: Setup) -> tuple[dict[str, int], dict[int, int]]:
        """Build the measured layers; the rest of the model is on a device that does not exist.

        Layers are compiled if the job says so, before the first step.

        Returns the number of elements of each parameter, by name, and of compiled layers ``Cut.operand_bytes``.
        """
        if not is_prepared(setup.data):  # the driver's temporary folder is on another host
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="raypipe-profile-")
            own = Path(self._folder.name)
            if not is_prepared(own):
                prepare_data(setup.job, build_model(setup.job, setup.fields).task, own)
            setup = replace(setup, data=own)
        # The tasks of a replay have no times, and take no memory of their own: layers are measured uncaptured.
        train = setup.job.train.model_copy(update={"cuda_graphs": "none"})
        self.setup(replace(setup, job=setup.job.model_copy(update={"train": train})))
        operands = dict[int, int]()
        if train.compile == "inductor":  # a layer that cannot be compiled runs eagerly, as in training
            from raypipe.runtime.compiled.compiler import InProcess
            from raypipe.runtime.worker.compilation import Compilation  # these import the compiler

            # Here, because layers are many and small: a process for each would take longer than they do.
            here = InProcess.of_run(self.setup_data, self.executor)
            Compilation(self.setup_data, self.executor, here, waits=True).begin()
            operands = {key[0]: max(cut.operand_bytes for *_, cut in of.parts) for key, of in here.traced.items()}
        channel = FakeChannel(self.device)
        self.executor.senders = {1: channel}
        self.executor.receivers = {1: channel}
        sizes = {name: p.numel() for module in self.modules.values() for name, p in module.named.items()}
        return sizes, operands

    def clear(self) -> None:
        """Delete the temporary data. This must be called, because the process will be killed without cleaning up."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    @raises_device_errors
    def run_layers(self, program: Program, warm_up: int, effort: Effort, memory: bool) -> Samples:
        """Run a step repeatedly and time its tasks, after measuring its memory if ``memory`` is set.

        ``effort`` says how often.
        """
        train = self.setup_data.job.train
        in_use: list[tuple[int, int]] = []
        peaks: list[int] = []
        looks: list[NDArray[np.int64]] = []
        ran: list[float] = []
        own_clock = time.thread_time if self.device.type == "cpu" else lambda: math.nan

        def plain(executor: Executor, action: Action) -> None:
            HANDLERS[action.task.kind](executor, action)

        def timed(executor: Executor, action: Action) -> None:
            before = own_clock()
            plain(executor, action)  # on a GPU, the runner's clock measures the task instead
            ran.append(own_clock() - before)

        def metered(executor: Executor, action: Action) -> None:
            before = allocated_bytes(self.device)
            plain(executor, action)
            in_use.append((before, allocated_bytes(self.device)))

        def peaking(executor: Executor, action: Action) -> None:
            with PeakMeter(self.device) as meter:
                plain(executor, action)
            peaks.append(meter.peak - meter.before)

        def timed_and_metered(executor: Executor, action: Action) -> None:
            with PeakMeter(self.device) as meter:
                timed(executor, action)
            in_use.append((meter.before, allocated_bytes(self.device)))
            peaks.append(meter.peak - meter.before)

        def look() -> NDArray[np.int64]:
            return np.array([(a, a + peak, b) for (a, b), peak in zip(in_use, peaks, strict=True)])

        number = itertools.count()

        def step(run_task: Handler) -> NDArray[np.float64]:
            self.executor.handlers = dict.fromkeys(HANDLERS, run_task)
            n = next(number)
            return self.executor.run(program, n, learning_rate(train, n)).times

        for _ in range(warm_up):
            step(timed)
        if memory and not effort.once:
            gc.collect()
            gc.disable()  # otherwise reference cycles of earlier steps may be freed in the middle of a task
            began = time.thread_time()
            while len(looks) < LOOKS and (not looks or time.thread_time() - began < LOOKING_S):
                in_use.clear()
                peaks.clear()
                step(metered)
                step(peaking)  # in a step of its own, because the meter itself allocates memory that is freed late
                looks.append(look())
            gc.enable()
        times: list[NDArray[np.float64]] = []
        ran.clear()
        until = time.monotonic() + effort.budget_s
        while len(times) < effort.least or (len(times) < effort.most and time.monotonic() < until):
            times.append(step(timed_and_metered if memory and effort.once else timed))
        if memory and effort.once:
            looks.append(look())
        order: tuple[Task, ...] = tuple(action.task for action in program.actions)
        return Samples(order, np.stack(times), np.array(ran).reshape(len(times), -1), middle_look(looks))

    @raises_device_errors
    def expert_loads(self, program: Program) -> dict[int, list[int]]:
        """Run a step; return the rows that the router of each layer gave to its experts, by layer.

        Grouped products, as which experts were captured, say how many of their rows each expert has.
        """
        result: dict[int, list[int]] = {}

        def counting(executor: Executor, action: Action) -> None:
            seen = _GroupedRows()  # type: ignore[no-untyped-call]
            with seen if action.task.kind == "F" else nullcontext():
                HANDLERS[action.task.kind](executor, action)
            if seen.rows:
                known = result.setdefault(action.task.stage, [0] * len(seen.rows))
                result[action.task.stage] = [a + b for a, b in zip(known, seen.rows, strict=True)]

        self.executor.handlers = dict.fromkeys(HANDLERS, counting)
        self.executor.run(program, 0, learning_rate(self.setup_data.job.train, 0))
        return result

    @raises_device_errors
    def connect(self, topology: Topology) -> None:
        """Join the process groups and open the channels that are to be measured."""
        self._leave()
        self.communicators = Communicators(self.rank, topology, self._backend(topology))
        self._connected_bytes = taken_beside_tensors(self.device)

    def communicator_bytes(self) -> tuple[float, float]:
        """Return what a group's communicator takes of this GPU, and those of an edge, one each way; 0 on a CPU.

        NCCL connects what an algorithm needs when it is first used: after collectives were measured, it has.
        """
        opened = self.communicators
        later = max(0, taken_beside_tensors(self.device) - self._connected_bytes)
        each_group = (opened.groups_bytes + later) / max(1, len(opened.groups))
        return each_group, opened.channels_bytes / max(1, len(opened.receivers))

    @raises_device_errors
    def message_seconds(self, other: int, first: bool, sizes: Sequence[int], repeats: int) -> list[list[float]]:
        """Measure half of the seconds that a message takes to ``other`` and back.

        Args:
            other: rank of the other worker, which must make the same call.
            first: whether this worker sends first.
            sizes: message sizes in bytes.
            repeats: number of messages per size.

        Returns:
            Per size, the seconds of every repeat.
        """
        sender, receiver = self.communicators.senders[other], self.communicators.receivers[other]
        result: list[list[float]] = []
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
                    self._push(sender)
                receiver.recv(label, 60.0)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                times.append((time.monotonic() - start) / 2)
                if not first:
                    sender.send(label, payload)
                    self._push(sender)
                sender.flush(60.0)
            result.append(times)
        return result

    @raises_device_errors
    def collective_seconds(self, kind: str, group: str, sizes: Sequence[int], repeats: int) -> list[list[float]]:
        """Measure the seconds of a collective, per size in bytes of its whole buffer and repeat.

        Returns an empty list if this device is not in the group.
        """
        process_group = self.communicators.groups.get(group)
        if process_group is None:
            return []
        count = process_group.size()
        result: list[list[float]] = []
        for size in sizes:
            whole = torch.ones(max(1, size // 4 // count) * count, device=self.device)
            part = whole[: len(whole) // count].clone()
            times = []
            for _ in range(repeats + 1):
                self._work()
                dist.barrier(group=process_group)
                start = time.monotonic()
                if kind == "all_reduce":
                    dist.all_reduce(whole, group=process_group)
                elif kind == "all_gather":
                    start_all_gather(whole, part, process_group).wait()
                else:
                    start_reduce_scatter(part, whole, process_group).wait()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                times.append(time.monotonic() - start)
            result.append(times[1:])
        return result

    def _push(self, sender: Sender) -> None:
        """See to it that a message leaves, without the pauses of ``flush`` where a GPU sends it: they are longer."""
        if self.device.type != "cuda":
            sender.flush(60.0)
        until = time.monotonic() + 60.0
        while sender.pending and time.monotonic() < until:
            sender.progress()

    def _work(self) -> None:
        """Compute for a moment on a CPU device, as devices do in training before they send.

        The transport's threads sleep meanwhile, and then take longer to wake up than in a loop of messages alone, on a
        busy host sometimes milliseconds. Training sees the same times. Kernels of a GPU leave the host idle.
        """
        if self.device.type == "cuda":
            return
        matrix, until = torch.ones(256, 256), time.monotonic() + WORK_S
        while time.monotonic() < until:
            matrix @ matrix


def _processor() -> str:
    """Return the processor's model name."""
    with open("/proc/cpuinfo") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{name}, one core"


def process_bytes(device: torch.device, job: JobSpec) -> float:
    """Measure the memory that a training process needs without its model: resident, or on a GPU the GPU's.

    It trains a tiny model first, because the first backward and optimizer step load code. On a GPU it does so on every
    stream that computes products in a run of the job, because cuBLAS has a workspace for each.
    """
    if device.type == "cuda":
        streams = [torch.cuda.current_stream(device)]
        if job.parallel.side_stream is not None:
            streams.append(make_stream(device))
        if job.train.cuda_graphs != "none":
            streams.append(capture_stream(device))
        for stream in streams:
            with torch.cuda.stream(stream):
                _train_tiny_model(device)
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    _train_tiny_model(device)
    return float(resident_bytes())


def _train_tiny_model(device: torch.device) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).to(device)
    optimizer = untraced(torch.optim.AdamW)(layer.parameters(), fused=True)
    for bfloat16 in (False, False, True):  # bfloat16 matrix products load code of their own
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            q = layer(torch.ones(2, 4, 16, 64, device=device))
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            loss = F.cross_entropy(y.flatten(0, 2), torch.zeros(128, dtype=torch.long, device=device))
        torch.autograd.backward([loss], [torch.ones_like(loss)])  # with gradients, as a stage: that imports SymPy
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
