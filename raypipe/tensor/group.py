"""The tensor group that this device belongs to, and what its members exchange.

A process is one device, and the devices that share a stage's layers share all the stages a device holds, so one group
serves the whole process. Operations look it up when they run: a captured graph knows neither group nor rank.
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
    """Some devices that compute together, each on its share of the same layers."""

    rank: int
    size: int

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Begin to combine ``x`` over all members, in place; it holds the result once what is returned was called."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """What each member gave, all of one shape, in the order of their ranks."""

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """What each member gave, at member ``to``; None at the others."""


class Alone:
    """A group of one, for which nothing travels."""

    rank = 0
    size = 1

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Nothing to add."""
        return lambda: None

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """What was given."""
        return [x]

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """What was given."""
        return [x]


class ProcessGroup:
    """Members in processes of their own, over ``torch.distributed``."""

    def __init__(self, group: dist.ProcessGroup, wait: Callable[[str, dist.Work], object]) -> None:
        """``wait(what, work)`` waits for a collective, and says what it was if it never comes."""
        self.rank, self.size = group.rank(), group.size()
        self._group, self._wait = group, wait
        self.all_reduces = 0
        """All-reduces begun."""

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Runs beside what this device computes meanwhile."""
        op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(x, op, group=self._group, async_op=True)
        assert work is not None
        self.all_reduces += 1
        return lambda: self._wait("sum over the tensor group", work)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Blocks until all have come."""
        shares = [torch.empty_like(x) for _ in range(self.size)]
        work = dist.all_gather(shares, x, group=self._group, async_op=True)
        assert work is not None
        self._wait("gathering over the tensor group", work)
        return shares

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """What each member gave, at member ``to``; None at the others."""
        shares = [torch.empty_like(x) for _ in range(self.size)] if self.rank == to else None
        work = dist.gather(x, shares, group=self._group, group_dst=to, async_op=True)
        assert work is not None
        self._wait("gathering over the tensor group", work)
        return shares


class _Current(threading.local):
    group: TensorGroup | None = None
    meanwhile: Callable[[], None] | None = None


_current = _Current()
_everywhere: TensorGroup = Alone()


def current_group() -> TensorGroup:
    """This thread's group, or else the process's; a group of one where none was set."""
    return _current.group or _everywhere


def set_group(group: TensorGroup) -> None:
    """Make this the group of the whole process."""
    global _everywhere
    _everywhere = group


@contextmanager
def group_of_thread(group: TensorGroup) -> Iterator[None]:
    """Make this the group of what the calling thread does inside."""
    before, _current.group = _current.group, group
    try:
        yield
    finally:
        _current.group = before


@contextmanager
def meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Have ``call`` made in this thread whenever a collective has begun and nothing else can be done before its end."""
    before, _current.meanwhile = _current.meanwhile, call
    try:
        yield
    finally:
        _current.meanwhile = before


def all_reduced(x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """``x`` combined over the group, in place; what ``meanwhile`` names goes on while it is under way."""
    wait = current_group().start_all_reduce(x, operation)
    if _current.meanwhile is not None:
        _current.meanwhile()
    wait()
    return x
