"""The groups over which this process's layers are divided, what each member has of a parameter, and collectives.

The processes of a device divide all stages of that device among them, and the copies of an expert group the experts of
all their stages, so one group of each kind serves the whole process. Operations look the group up when they run,
because a captured graph contains neither group nor rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.errors import RunError

Wait = Callable[[], object]
# torch 2.13 renamed both, and warns about the old names; torch 2.9 has only those.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collectives on flat tensors."""
Axis = Literal["tensor", "experts", "context", "vocabulary"]
"""What divides layers: the tensor ranks of a device, copies that divide experts, copies that divide sequences, or the
stages that divide a head, which are no group."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Divides a parameter, its gradient and its optimizer state evenly along one dimension.

    A fused parameter (query, key and value in one matrix) consists of several parts, and each rank holds a share of
    every part.
    """

    dim: int
    parts: tuple[int, ...]
    """Lengths of the parts along ``dim``."""
    size: int
    """Number of ranks of the group."""
    padded: bool = False
    """Whether lengths need not divide by ``size``; the last shares are then padded with zeros."""
    axis: Axis = "tensor"
    """Which group divides it."""
    order: tuple[int, ...] = ()
    """Places along ``dim`` in the order in which ranks hold them; empty: ascending."""
    own_rank: int | None = None
    """The share, where it follows from the stage that holds it and not from the process; such shares may be uneven."""

    @property
    def rows(self) -> range:
        """The part of ``dim`` that the share with an ``own_rank`` is."""
        (length,) = self.parts
        assert self.own_rank is not None
        each = -(-length // self.size)
        return range(length)[self.own_rank * each : (self.own_rank + 1) * each]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the undivided tensor of which a share has shape ``shape``."""
        whole = list(shape)
        whole[self.dim] = sum(self.parts)
        return tuple(whole)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return the share of rank ``rank``, or of its own one, as a new tensor."""
        if self.own_rank is not None:
            return whole.narrow(self.dim, self.rows.start, len(self.rows)).clone()
        if self.order:
            length = len(self.order) // self.size
            chosen = torch.tensor(self.order[rank * length : (rank + 1) * length], device=whole.device)
            return whole.index_select(self.dim, chosen)
        # No torch.cat: of meta tensors it imports torch's tracer, for longer than all else here takes.
        lengths = [-(-part // self.size) for part in self.parts]
        shape = list(whole.shape)
        shape[self.dim] = sum(lengths)
        result, at = whole.new_zeros(shape), 0
        for part, length in zip(torch.split(whole, list(self.parts), self.dim), lengths, strict=True):
            first = min(rank * length, part.shape[self.dim])
            held = part.narrow(self.dim, first, min(length, part.shape[self.dim] - first))
            result.narrow(self.dim, at, held.shape[self.dim]).copy_(held)
            at += length
        return result

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Join the shares of all ranks, in rank order, to the undivided tensor."""
        if self.order:
            held = torch.cat(list(shares), self.dim)
            return held.index_select(self.dim, torch.tensor(self.order, device=held.device).argsort())
        lengths = [-(-part // self.size) for part in self.parts]
        pieces = zip(*(torch.split(share, lengths, self.dim) for share in shares), strict=True)
        parts = [
            torch.cat(piece, self.dim).narrow(self.dim, 0, length)
            for piece, length in zip(pieces, self.parts, strict=True)
        ]
        return torch.cat(parts, self.dim).contiguous()


class TensorGroup(Protocol):
    """Processes that compute together, each on its share of the same layers."""

    rank: int
    size: int

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """Start an in-place all-reduce of ``x``; calling the returned function waits for its result."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's ``x``, all of one shape, in rank order."""

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Start the same; return where it will be, ``[ranks, *x.shape]``, and what waits for it."""

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Start to sum ``x``, ``[ranks, ...]``; return where this rank's part will be, and what waits for it."""

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """Return every rank's ``x`` on rank ``to``; None on the others."""

    def start_all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> tuple[Tensor, Wait]:
        """Start to send ``sends[r]`` rows of ``x``, in order, to each rank r.

        Returns the rows received, in rank order (``receives[r]`` of them from rank r), and what waits for them.
        """


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

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Return ``x`` alone."""
        return x.unsqueeze(0), lambda: None

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        """Return all of ``x``."""
        return x[0], lambda: None

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """Return ``x`` alone."""
        return [x]

    def start_all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> tuple[Tensor, Wait]:
        """Return ``x``."""
        return x, lambda: None


class TracedGroup(SoloGroup):
    """Stands for the group where a program is made, which is the same for every rank of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getattribute__(self, name: str) -> Any:
        """Return the size.

        Raises:
            RunError: it is asked for anything else, which only an operator of the program may do when it runs.
        """
        if name in ("size", "__class__"):
            return super().__getattribute__(name)
        raise RunError("a compiled stage", f"its trace asks for {name} of its group", "make that an operator")


class ProcessGroup:
    """A group of several processes, over ``torch.distributed``."""

    def __init__(
        self, group: dist.ProcessGroup, wait: Callable[[str, dist.Work], object], axis: Axis = "tensor"
    ) -> None:
        """Use ``wait(what, work)`` to wait for a collective; ``what`` names it in its error."""
        self.rank, self.size = group.rank(), group.size()
        self._group, self._wait, self._name = group, wait, f"the {axis} group"
        self.all_reduces = 0
        """Number of all-reduces started."""
        self.all_to_alls = 0.0
        """Number of all-to-alls; every rank counts its share of one."""

    def start_all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Wait:
        """See TensorGroup.start_all_reduce; it runs while this process computes."""
        op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(x, op, group=self._group, async_op=True)
        assert work is not None
        self.all_reduces += 1
        return lambda: self._wait(f"sum over {self._name}", work)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See TensorGroup.all_gather; it blocks until all ranks have sent theirs."""
        shares = [torch.empty_like(x) for _ in range(self.size)]
        work = dist.all_gather(shares, x, group=self._group, async_op=True)
        assert work is not None
        self._wait(f"gathering over {self._name}", work)
        return shares

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        """See TensorGroup.start_all_gather; it runs while this process computes."""
        result = x.new_empty((self.size, *x.shape))
        work = ALL_GATHER(result.flatten(), x.flatten(), group=self._group, async_op=True)
        return result, lambda: self._wait(f"gathering over {self._name}", work)

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Wait]:
        """See TensorGroup.start_reduce_scatter; it runs while this process computes."""
        result = x.new_empty(x.shape[1:])
        work = REDUCE_SCATTER(result.flatten(), x.flatten(), group=self._group, async_op=True)
        return result, lambda: self._wait(f"sums over {self._name}", work)

    def gather(self, x: Tensor, to: int) -> list[Tensor] | None:
        """See TensorGroup.gather."""
        shares = [torch.empty_like(x) for _ in range(self.size)] if self.rank == to else None
        work = dist.gather(x, shares, group=self._group, group_dst=to, async_op=True)
        assert work is not None
        self._wait(f"gathering over {self._name}", work)
        return shares

    def start_all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> tuple[Tensor, Wait]:
        """See TensorGroup.start_all_to_all; rows travel while this process computes."""
        result = x.new_empty((sum(receives), *x.shape[1:]))
        work = dist.all_to_all_single(
            result, x.contiguous(), list(receives), list(sends), group=self._group, async_op=True
        )
        assert work is not None
        self.all_to_alls += 1 / self.size
        return result, lambda: self._wait(f"all-to-all over {self._name}", work)


class _Current(threading.local):
    def __init__(self) -> None:
        self.groups: dict[Axis, TensorGroup] = {}
        self.meanwhile: Callable[[], None] | None = None


_current = _Current()
_process_groups: dict[Axis, TensorGroup] = {}


def current_group(axis: Axis = "tensor") -> TensorGroup:
    """Return this thread's group, else the process's; a group of one process if none was set."""
    return _current.groups.get(axis) or _process_groups.get(axis) or _solo


_solo = SoloGroup()


def set_group(group: TensorGroup, axis: Axis = "tensor") -> None:
    """Set the group of the whole process."""
    _process_groups[axis] = group


@contextmanager
def group_of_thread(group: TensorGroup, axis: Axis = "tensor") -> Iterator[None]:
    """Set the group of the calling thread inside the block."""
    before, _current.groups = _current.groups, {**_current.groups, axis: group}
    try:
        yield
    finally:
        _current.groups = before


@contextmanager
def meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block, call ``call`` in this thread between the start of a collective and the wait for its result."""
    before, _current.meanwhile = _current.meanwhile, call
    try:
        yield
    finally:
        _current.meanwhile = before


def all_reduced(x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """All-reduce ``x`` in place and return it; the function that ``meanwhile`` set is called while it runs."""
    wait = current_group().start_all_reduce(x, operation)
    _meanwhile()
    wait()
    return x


def reduce_scattered(shares: Tensor) -> Tensor:
    """Return this rank's of the sums of ``shares``, ``[ranks, ...]``; ``meanwhile`` as in ``all_reduced``."""
    result, wait = current_group().start_reduce_scatter(shares)
    _meanwhile()
    wait()
    return result


def all_gathered(share: Tensor) -> Tensor:
    """Return every rank's ``share``, in rank order: ``[ranks, ...]``; ``meanwhile`` as in ``all_reduced``."""
    result, wait = current_group().start_all_gather(share)
    _meanwhile()
    wait()
    return result


def start_exchange(
    sends: Sequence[int], receives: Sequence[int], *tensors: Tensor
) -> tuple[list[Tensor], Callable[[], None]]:
    """Start to exchange rows of several tensors over the experts' group; all members name them in order.

    They travel in one message, of several dtypes too: what a message costs beside its bytes is paid once.

    Returns the rows received (``TensorGroup.start_all_to_all``), and what waits for them. It first calls the function
    that ``meanwhile`` set.
    """
    packed, unpacked = tensors[0].contiguous(), None
    if len(tensors) > 1:
        packed, unpacked = _side_by_side(tensors)
    result, arrive = current_group("experts").start_all_to_all(packed, sends, receives)

    def wait() -> None:
        _meanwhile()
        arrive()

    return [result] if unpacked is None else unpacked(result), wait


def _side_by_side(tensors: Sequence[Tensor]) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Copy the rows of matrices into one of bytes; return it, and what makes their views of such a matrix."""
    widest = max(x.element_size() for x in tensors)
    places: dict[int, slice] = {}
    end = 0
    for n in sorted(range(len(tensors)), key=lambda n: -tensors[n].element_size()):  # so that all are aligned
        begin, end = end, end + tensors[n].shape[1] * tensors[n].element_size()
        places[n] = slice(begin, end)

    def views(packed: Tensor) -> list[Tensor]:
        return [packed[:, places[n]].view(x.dtype) for n, x in enumerate(tensors)]

    packed = tensors[0].new_empty((len(tensors[0]), -(-end // widest) * widest), dtype=torch.uint8)
    for view, x in zip(views(packed), tensors, strict=True):
        view.copy_(x)
    return packed, views


def _meanwhile() -> None:
    if _current.meanwhile is not None:
        _current.meanwhile()
