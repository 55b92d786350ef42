"""The tensor-parallel group of this process, and its collectives.

The processes of a device divide all stages of that device among them, so one group serves the whole process. Operations
look the group up when they run, because a captured graph contains neither group nor rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Wait = Callable[[], object]


class TensorGroup(Protocol):
    """Processes that compute together, each on its share of the same layers."""

    rank: int
    size: int

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Start an in-place all-reduce of ``x``; calling the returned function waits for its result."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's ``x``, all of one shape, in rank order."""

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """Return every rank's ``x`` on rank ``to``; None on the others."""


class SoloGroup:
    """A group of one process, which communicates nothing."""

    rank = 0
    size = 1

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Leave ``x`` as it is."""
        return lambda: None

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return ``x`` alone."""
        return [x]

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """Return ``x`` alone."""
        return [x]


class ProcessGroup:
    """A group of several processes, over ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[str, dist.Work], object]) -> None:
        """Use ``wait(what, work)`` to wait for a collective; ``what`` names it in its error."""
        self.rank, self.size = group.rank(), group.size()
        self._group, self._wait = group, wait
        self.all_reduces = 0
        """Number of all-reduces started."""

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """See TensorGroup.start_all_reduce; it runs while this process computes."""
        op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(x, op, group=self._group, async_op=True)
        assert work is not None
        self.all_reduces += 1
        return lambda: self._wait("sum over the tensor group", work)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See TensorGroup.all_gather; it blocks until all ranks have sent theirs."""
        shares = [torch.empty_like(x) for _ in range(self.size)]
        work = dist.all_gather(shares, x, group=self._group, async_op=True)
        assert work is not None
        self._wait("gathering over the tensor group", work)
        return shares

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """See TensorGroup.gather."""
        shares = [torch.empty_like(x) for _ in range(self.size)] if self.rank == to else None
        work = dist.gather(x, shares, group=self._group, group_dst=to, async_op=True)
        assert work is not None
        self._wait("gathering over the tensor group", work)
        return shares


class _Current(threading.local):
    group: TensorGroup | None = None
    meanwhile: Callable[[], None] | None = None


_current = _Current()
_process_group: TensorGroup = SoloGroup()


def current_group() -> TensorGroup:
    """Return this thread's group, else the process's; a group of one process if none was set."""
    return _current.group or _process_group


def set_group(group: TensorGroup) -> None:
    """Set the group of the whole process."""
    global _process_group
    _process_group = group


@contextmanager
def group_of_thread(group: TensorGroup) -> Iterator[None]:
    """Set the group of the calling thread inside the block."""
    before, _current.group = _current.group, group
    try:
        yield
    finally:
        _current.group = before


@contextmanager
def meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call ``call`` in this thread between the start of an all-reduce and the wait for its result."""
    before, _current.meanwhile = _current.meanwhile, call
    try:
        yield
    finally:
        _current.meanwhile = before


def all_reduced(x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """All-reduce ``x`` in place and return it; the function that ``meanwhile`` set is called while it runs."""
    wait = current_group().start_all_reduce(x, operation)
    if _current.meanwhile is not None:
        _current.meanwhile()
    wait()
    return x
