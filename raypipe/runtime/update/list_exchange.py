"""An all-gather of one number per rank in ceil(log2 n) hops, which other ranks' compute does not hold up.

In hop k a rank sends the 2^k numbers that it knows to the rank 2^k below it and receives as many from the rank 2^k
above it, so the lists double. A rank takes part in log2 n messages each way instead of n - 1.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby 1997, Efficient algorithms for all-to-all communications in multiport
message-passing systems, section 4 (concatenation). It needs no power of two.
"""

from __future__ import annotations

import queue
import threading
import weakref

import torch
import torch.distributed as dist

TAG = 1
"""Tag of these messages; all others on a world's process group have tag 0."""


class Exchange:
    """One all-gather under way; used as a ``torch.distributed.Work``."""

    def __init__(self, number: float, into: torch.Tensor) -> None:
        self.number, self.into = number, into
        self.error: RuntimeError | None = None
        self.done = threading.Event()

    def is_completed(self) -> bool:
        """Return whether the numbers of all ranks have arrived, or cannot arrive."""
        return self.done.is_set()

    def wait(self) -> None:
        """Wait for the numbers of all ranks.

        Raises:
            RuntimeError: a rank did not send its own in time, or is gone.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error


class ListExchange:
    """Runs all-gathers one after another in a thread, which passes on lists of others while this rank computes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._todo: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(group, self._todo), name="raypipe-norm", daemon=True).start()
        weakref.finalize(self, self._todo.put, None)

    def start(self, number: float, into: torch.Tensor) -> Exchange:
        """Send this rank's number; those of all ranks go into ``into`` (float64, [ranks]), by rank."""
        one = Exchange(number, into)
        self._todo.put(one)
        return one


def _work(group: dist.ProcessGroup, todo: queue.SimpleQueue[Exchange | None]) -> None:
    while (one := todo.get()) is not None:
        try:
            gather(group, one.number, one.into)
        except RuntimeError as error:
            one.error = error
        one.done.set()


def gather(group: dist.ProcessGroup, number: float, into: torch.Tensor) -> None:
    """Gather the numbers of all ranks; ``into`` is float64, [ranks].

    Raises:
        RuntimeError: a message did not arrive in time.
    """
    ranks, me = group.size(), group.rank()
    known = torch.empty(ranks, dtype=torch.float64)  # number k is that of rank me + k
    known[0] = number
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
    into.copy_(known.roll(me))
