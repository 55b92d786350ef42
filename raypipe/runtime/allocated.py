"""Measure the memory of a worker process: the bytes its allocator has in use, their peak, and the resident set."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.runtime.process import heap_bytes


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


def process_bytes(device: torch.device) -> float:
    """Measure the memory that a training process needs without its model: resident, or on a GPU the GPU's.

    It trains a tiny model first, because the first backward and optimizer step load about 100 MB of code.
    """
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for bfloat16 in (False, False, True):  # bfloat16 matrix products load code of their own
        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
            q = layer(torch.ones(2, 4, 16, 64, device=device))
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            loss = F.cross_entropy(y.flatten(0, 2), torch.zeros(128, dtype=torch.long, device=device))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    return float(resident_bytes())


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
