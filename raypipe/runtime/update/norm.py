"""The global gradient norm: how devices exchange their shares of it, and what clipping does with it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.models.host_copies import to_host
from raypipe.runtime.update.collectives import Pending, Push, start_all_gather, wait_for
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
    """Sends a few numbers of every device to every device, beside compute; the first is its share of the squared norm.

    Every device adds up the same list, exactly (``norm_of``): so all of them, and the driver, see the same bits,
    whatever order a collective would have added in. Few devices send to one another directly: one hop. More of them
    pass lists on (``gather``), where Gloo's sums and gathers go round a ring of all devices, twice or once.
    """

    what = "global gradient norm"
    """Names the exchange in errors."""

    def __init__(self, world: dist.ProcessGroup | None, one_hop: int = ONE_HOP) -> None:
        self.ranks = 1 if world is None else world.size()
        self._world = world
        self._lists = None
        if world is not None and self.ranks > one_hop:  # lists of others are passed on while this rank computes
            self._lists = ThreadPoolExecutor(1, thread_name_prefix="raypipe-norm")
        self._rows = torch.zeros(self.ranks, 1, dtype=torch.float64)
        """The numbers of each device."""
        self._work: Pending | None = None

    def start(self, share: float | Tensor) -> None:
        """Send this device's share (of a tensor, its value); a thread does the rest."""
        self._send([float(share)])

    def _send(self, numbers: Sequence[float]) -> None:
        own = torch.tensor([numbers] * self.ranks, dtype=torch.float64)
        self._rows = own if self._world is None else torch.empty_like(own)
        if self._lists is not None and self._world is not None:
            self._work = _InThread(self._lists.submit(gather, self._world, own[0], self._rows))
        elif self._world is not None:
            self._work = dist.all_to_all_single(self._rows, own, group=self._world, async_op=True)

    def ready(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self, push: Push) -> list[float]:
        """Wait for the numbers of all devices, and return their shares by rank.

        Raises:
            TransportError: a device did not hand in its own in time.
        """
        if self._work is not None:
            wait_for(self.what, self._work, push)
            self._work = None
        return self._rows[:, 0].tolist()

    def leave(self) -> None:
        """Let go of the process group and of what is under way on it, for good."""
        self._world = self._work = None


class _InThread:
    """Work of a thread, used as a ``torch.distributed.Work``."""

    def __init__(self, future: Future[None]) -> None:
        self.is_completed, self.wait, self.get_future = future.done, future.result, lambda: future


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


# The global gradient norm where the host runs ahead of its device: shares, norm and clip factor stay on the device.
#
# Clipping multiplies by a factor that the host never sees, so an update that waits for the norm is queued like any
# other work. The host reads norms only to choose how later updates are made, and to undo one that was made too early.


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

    def leave(self) -> None:
        """Let go of the group, for good."""
        self._group = None

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
    result: list[float] = host.tolist()
    return result


TAG = 1
"""Tag of these messages; all others on a world's process group have tag 0."""


def gather(group: dist.ProcessGroup, own: Tensor, into: Tensor) -> None:
    """Gather the numbers of all ranks, ``[numbers]`` each, in ceil(log2 n) hops; ``into`` is ``[ranks, numbers]``.

    In hop k a rank sends the 2^k rows that it knows to the rank 2^k below it and receives as many from the rank 2^k
    above it, so the lists double. A rank takes part in log2 n messages each way instead of n - 1.

    Raises:
        RuntimeError: a message did not arrive in time.

    Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, Efficient algorithms for all-to-all communications in multiport
    message-passing systems, section 4 (concatenation). It needs no power of two.
    """
    ranks, me = group.size(), group.rank()
    known = torch.empty_like(into)  # row k is that of rank me + k
    known[0] = own
    count = 1
    while count < ranks:
        more = min(count, ranks - count)
        to, source = (dist.get_global_rank(group, (me + step) % ranks) for step in (-count, count))
        sent = dist.isend(known[:more], to, group=group, tag=TAG)
        received = dist.irecv(known[count : count + more], source, group=group, tag=TAG)
        assert sent is not None
        assert received is not None
        received.wait()
        sent.wait()
        count += more
    into.copy_(known.roll(me, 0))
