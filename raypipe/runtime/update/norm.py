"""The global gradient norm: how devices exchange their shares of it, and what clipping does with it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.runtime.update.collective import Pending, Push, wait_for
from raypipe.runtime.update.list_exchange import ListExchange
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy, resolve

ONE_HOP = 32
"""Most devices that send their shares to one another directly. At 4 and 8, lists took 1.8 and 0.9 ms longer on a busy
machine; where they begin to win was not measured, so the number is a guess: 31 small messages each way."""


def clip_factor(limit: float, norm: float) -> float:
    """Return the factor for gradients of global norm ``norm``; 1.0 means that nothing is clipped.

    The rule of ``torch.nn.utils.clip_grad_norm_``. A norm that is not a number clips nothing.
    """
    factor = limit / (norm + 1e-6)
    return factor if factor < 1.0 else 1.0


class Shares:
    """Sends one number of every device to every device, beside compute.

    Every device adds up the same list, exactly (``norm_of``): so all of them, and the driver, see the same bits,
    whatever order a collective would have added in. Few devices send to one another directly: one hop. More of them
    pass lists on (``ListExchange``), where Gloo's sums and gathers go round a ring of all devices, twice or once.
    """

    def __init__(self, world: dist.ProcessGroup | None, one_hop: int = ONE_HOP) -> None:
        self.ranks = 1 if world is None else world.size()
        self._world = world
        self._lists = None if world is None or self.ranks <= one_hop else ListExchange(world)
        self._shares = torch.zeros(self.ranks, dtype=torch.float64)
        self._work: Pending | None = None

    def start(self, share: float | Tensor) -> None:
        """Send this device's number (of a tensor, its value); a thread does the rest."""
        value = float(share)
        own = torch.full((self.ranks,), value, dtype=torch.float64)
        self._shares = own
        if self._lists is not None:
            self._shares = torch.empty_like(own)
            self._work = self._lists.start(value, self._shares)
        elif self._world is not None:
            self._shares = torch.empty_like(own)
            self._work = dist.all_to_all_single(self._shares, own, group=self._world, async_op=True)

    def ready(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self, push: Push) -> list[float]:
        """Wait for the numbers of all devices, and return them by rank.

        Raises:
            TransportError: a device did not hand in its own in time.
        """
        if self._work is not None:
            wait_for("global gradient norm", self._work, push)
            self._work = None
        return self._shares.tolist()


def norm_of(shares: Iterable[float]) -> float:
    """Return the global gradient norm from the devices' shares of its square."""
    try:
        return math.sqrt(math.fsum(shares))
    except OverflowError:
        return math.inf


class Forecast:
    """Predicts whether the next update needs no clipping. Every device sees the same norms, so all agree.

    An optimistic update that is undone costs hardly more than a wait, since a device stops running ahead when the norm
    comes. So there is no need for a safe distance: ``auto`` expects a norm within the limit where the last one was.
    """

    def __init__(self, limit: float, requested: RequestedNormPolicy) -> None:
        self.limit, self.requested = limit, requested
        self._calm = False

    def saw(self, norm: float) -> None:
        """Record the norm of a step."""
        self._calm = math.isfinite(norm) and clip_factor(self.limit, norm) == 1.0

    def optimistic(self) -> bool:
        """Return whether to make the next update before its norm is known."""
        return resolve(self.requested, lambda: self._calm) == "optimistic"
