"""Memory of a device's process: what its allocator has handed out, and what is resident."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.runtime.process import heap_bytes


def allocated_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU what torch's allocator has handed out, else what malloc has.

    Where the C library cannot tell, the resident set, which moves in pages and seldom falls.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return heap_bytes()
    except (OSError, AttributeError):
        return resident_bytes()


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, the most memory in use after any operator; on a GPU, the allocator's own peak.

    What a kernel needs for itself and gives back before it returns is seen on GPUs only.
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
    """What a process takes that has trained something tiny and dropped it again; on a GPU, of its memory.

    The first backward and the first optimizer step load a hundred megabytes of code that no tensor will ever fill.
    """
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for narrow in (False, False, True):  # products in bfloat16 load code of their own
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
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
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
