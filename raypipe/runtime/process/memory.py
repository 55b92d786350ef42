"""Measure the memory of a worker process: the bytes its allocator has in use, their peak, and the resident set."""

from __future__ import annotations

import resource
import time
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.partition.this_machine import host_memory_bytes
from raypipe.runtime.process.set_up import heap_bytes


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes in use: by torch's allocator on a GPU, by malloc on a CPU.

    Where the C library does not report them, it is the resident set, which changes in pages and rarely shrinks.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return heap_bytes()
    except (OSError, AttributeError):
        return resident_bytes()


def taken_beside_tensors(device: torch.device) -> int:
    """Return the bytes of a GPU that are taken beside what torch's allocator has reserved; 0 on a CPU.

    These are contexts, loaded kernels and buffers of communicators, of every process that uses the GPU, and what other
    processes' allocators have.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def pool_gaps(device: str, streams: int) -> float:
    """Return the bytes of a GPU that torch's allocator takes and no tensor has: each stream's pools end in a step.

    It takes 20 MiB at once for tensors from 1 MiB on, and 2 MiB for smaller ones. 0 on a CPU. ``streams``: of a device
    with others, one that computes and one for messages (``python -m tests.gpu_shim.memory`` holds plans against it).
    """
    return 0.0 if device == "cpu" else float(streams * (22 << 20))


def peak_bytes(device: torch.device) -> int:
    """Return the most memory taken so far: of the GPU, with what is taken beside tensors now; else by the process."""
    if device.type == "cuda":
        return taken_beside_tensors(device) + torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records the peak of the memory in use, in bytes, as ``peak``.

    On a GPU it is the allocator's own peak. On a CPU memory is read after every operator, so what a kernel allocates
    and frees before it returns is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.before = self.peak = 0

    def __enter__(self) -> PeakMeter:
        self.before = self.peak = allocated_bytes(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated_bytes(self.device))
        return out


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


class MeasuredMemory(NamedTuple):
    """In bytes."""

    peak: int
    """See ``peak_bytes``."""
    limit: float
    """All of the GPU's memory, or the host's."""


class MemoryReports:
    """Reports a device's memory with the results of its steps, at most once a second."""

    EVERY_S = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._due = 0.0
        self._limit = (
            float(torch.cuda.get_device_properties(device).total_memory)
            if device.type == "cuda"
            else host_memory_bytes()
        )

    def due(self) -> MeasuredMemory | None:
        """The present state; None where the last one is younger than a second."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + self.EVERY_S
        return MeasuredMemory(peak_bytes(self._device), self._limit)
