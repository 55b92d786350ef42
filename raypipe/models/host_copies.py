"""Copies between the host and a GPU for which the host does not wait.

CUDA makes the host wait for a copy unless the host's side of it is in pinned memory and the copy is declared
``non_blocking``. torch keeps pinned memory in a pool of its own, and reuses a block only when the copies out of it and
into it are done; so in steady state nothing is allocated, and a caller may drop its reference at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def runs_behind(device: torch.device) -> bool:
    """Return whether a device works off what the host has launched, rather than in the call itself."""
    return device.type != "cpu"


def pinned(x: Tensor) -> Tensor:
    """Return a copy of a CPU tensor in pinned memory."""
    return x.pin_memory()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device``, in the order of the current stream; on a CPU it is ``x`` itself."""
    return pinned(x).to(device, non_blocking=True) if runs_behind(device) else x


def to_host(x: Tensor) -> Tensor:
    """Start copying a tensor to the host. Read the result only when an event recorded afterwards has passed."""
    if not runs_behind(x.device):
        return x
    host = pinned(torch.empty(x.shape, dtype=x.dtype))
    host.copy_(x.detach(), non_blocking=True)
    return host


STREAMS = 32
"""Streams that a GPU has of one priority; torch gives out the same ones again after so many."""
_streams: dict[tuple[torch.device, int], dict[str, Any]] = {}


def named_stream(device: torch.device, name: str, priority: int = 0) -> Any:
    """Return this process's stream of a name, the same one each time, also where a device is set up again.

    Beyond the number that the hardware has, names share the streams of the later half. Transfers to several peers then
    go one after the other, which their order allows (``schedule.lowering.safe_order``), and what was named first, such
    as uploads and gradients on a second stream, keeps its own.
    """
    known = _streams.setdefault((device, priority), {})
    if name not in known:
        shared = STREAMS // 2 + len(known) % (STREAMS // 2)
        known[name] = make_stream(device, priority) if len(known) < STREAMS else [*known.values()][shared]
    return known[name]


def make_stream(device: torch.device, priority: int) -> Any:
    """Return a new stream of a GPU."""
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


class Uploads:
    """Copies the host's tensors to a device beside its compute, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = named_stream(device, "uploads") if device.type == "cuda" else None

    def start(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying CPU tensors; pass the result through ``use`` before anything else."""
        if self._stream is None:
            return {name: to_device(x, self.device) for name, x in tensors.items()}
        with torch.cuda.stream(self._stream):
            return {name: to_device(x, self.device) for name, x in tensors.items()}

    def use(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the compute stream wait for all copies started so far; the host goes on."""
        if self._stream is not None:
            compute: Any = torch.cuda.current_stream(self.device)
            compute.wait_stream(self._stream)
            for x in tensors.values():
                x.record_stream(compute)
