"""The global gradient norm where the host runs ahead of its device: shares, norm and clip factor stay on the device.

Clipping multiplies by a factor that the host never sees, so an update that waits for the norm is queued like any other
work. The host reads norms only to choose how later updates are made, and to undo one that was made too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.models.host_copies import to_host
from raypipe.runtime.update.collective import Push
from raypipe.runtime.update.flat_collectives import start_all_gather


def passing() -> Any:
    """Return an event that the current stream of the current GPU passes; see ``host_copies.to_host``."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class DeviceShares:
    """As ``norm.Shares``, over a group of devices that gathers their tensors; None for one that knows the norm alone.

    Every device adds the same list in the same order, so all come to the same factor.
    """

    def __init__(self, group: dist.ProcessGroup | None, event: Callable[[], Any] = passing) -> None:
        self.ranks = 1 if group is None else group.size()
        self._group, self._event = group, event
        self._shares = torch.zeros(1, dtype=torch.float64)
        self._on_host: deque[tuple[Tensor, Any]] = deque()

    @property
    def alone(self) -> bool:
        """Return whether the norm needs no other device: then waiting costs nothing, and nothing is read back."""
        return self._group is None

    def start(self, share: Tensor) -> None:
        """Queue the exchange of this device's share, a float64 scalar; later work on the device waits for it."""
        own = share.detach().reshape(1)
        self._shares = own
        if self._group is None:
            return
        self._shares = own.new_empty(self.ranks)
        work = start_all_gather(self._shares, own, self._group)
        work.wait()  # with NCCL the current stream waits, not the host
        host, passed = to_host(self._shares), self._event()
        passed.record()
        self._on_host.append((host, passed))

    def factor(self, limit: float) -> Tensor:
        """Return ``norm.clip_factor`` of the norm, float64 scalar on the device: 1 where nothing is clipped."""
        factor = limit / (self._shares.sum().sqrt() + 1e-6)
        return torch.where(factor < 1.0, factor, torch.ones_like(factor))

    def not_finite(self) -> Tensor:
        """Return 1 where the norm is infinite or not a number, else 0; float32 scalar on the device."""
        return self._shares.sum().isfinite().logical_not().float()

    def ready(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return not self._on_host or bool(self._on_host[-1][1].query())

    def wait(self, push: Push) -> list[float]:
        """Return the newest shares of all devices, by rank; the host waits for them."""
        return _read(self._on_host[-1])

    def earlier(self) -> list[list[float]]:
        """Return, and forget, the shares of all exchanges but the newest, oldest first.

        Every device asks at the same places of the run, so all see the same. The host has to wait only where it is more
        than a step ahead of its device.
        """
        return [_read(self._on_host.popleft()) for _ in range(len(self._on_host) - 1)]


def _read(copy: tuple[Tensor, Any]) -> list[float]:
    host, passed = copy
    if not passed.query():
        passed.synchronize()
    found: list[float] = host.tolist()
    return found
