"""Collectives of gradients and weights: flat tensors, sums in another dtype, and waits that name what failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import PUSH_EVERY_S
from raypipe.tensor.group import ALL_GATHER, REDUCE_SCATTER

# Waits for a collective while the device's own messages move on, and names the collective if it fails.


Push = Callable[[], bool]
"""Moves this device's own messages on; True while some are left that only another push can move."""


class Pending(Protocol):
    """The methods of ``torch.distributed.Work`` that are used here."""

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""

    def wait(self) -> Any:
        """Wait; raise RuntimeError if it failed."""

    def get_future(self) -> Any:
        """Return what calls back when it is complete."""


def wait_for(what: str, work: Pending, push: Push) -> None:
    """Wait for a collective. A pending message of this device may be what the last member needs before it can join.

    Raises:
        TransportError: another member did not join in time; Gloo's own error names neither what was waited for nor for
            whom.
    """
    while push() and not work.is_completed():
        time.sleep(PUSH_EVERY_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(
            what, f"another holder did not join: {error}", "see which stage failed or hangs; train.message_timeout_s"
        ) from error


# Collectives on flat tensors.


def start_all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill ``whole`` with the members' shards in rank order."""
    work: dist.Work = ALL_GATHER(whole, shard, group=group, async_op=True)
    return work


def start_reduce_scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum ``whole`` over the members; each gets its own shard of the sum."""
    work: dist.Work = REDUCE_SCATTER(shard, whole, group=group, async_op=True)
    return work


# Sums, perhaps in another dtype than the tensor's own: ``parallel.reduce_dtype``.


class CastWork:
    """A collective on a copy of a tensor in another dtype; ``wait`` casts the result back.

    Rounds to nearest: once when the copy is made, and in every addition of the collective. So a sum of two members in
    bfloat16 is that of their rounded gradients, rounded; with more, its last bits depend on the order of the additions,
    which the backend chooses. All members get the same bits.
    """

    def __init__(self, work: dist.Work, result: Tensor, target: Tensor) -> None:
        self._work, self._target = work, target
        self._result: Tensor | None = result
        self.is_completed, self.get_future = work.is_completed, work.get_future

    def wait(self) -> None:
        """Wait for the collective, and cast its result back, once."""
        self._work.wait()
        if self._result is not None:
            self._target.copy_(self._result)
            self._result = None


def start_sum(
    flat: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None = None, own: slice | None = None
) -> tuple[Pending, Tensor]:
    """Start to sum a tensor over a group, in place.

    Args:
        flat: the tensor.
        group: the members.
        dtype: of the sum; None, or the tensor's own, for no cast.
        own: this member's part, if it is to get that alone (reduce-scatter).

    Returns:
        What to wait for, and where the result will be: in a copy of its own where only a part of a cast is kept, so
        that ``flat`` can be freed at once.
    """
    copy = flat if dtype is None else flat.to(dtype)
    result = copy if own is None else copy[own]
    work = (
        dist.all_reduce(copy, group=group, async_op=True) if own is None else start_reduce_scatter(result, copy, group)
    )
    assert work is not None
    if copy is flat:
        return work, result
    target = flat if own is None else torch.empty_like(flat[own])
    return CastWork(work, result, target), target
