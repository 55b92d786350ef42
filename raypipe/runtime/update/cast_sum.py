"""Gradients summed in another dtype than their own: ``parallel.reduce_dtype``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.runtime.update.collective import PendingSum


class CastWork:
    """A collective on a copy of a tensor in another dtype; ``wait`` casts the result back.

    Rounds to nearest: once when the copy is made, and in every addition of the collective. So a sum of two members in
    bfloat16 is that of their rounded gradients, rounded; with more, its last bits depend on the order of the additions,
    which the backend chooses. All members get the same bits.

    Args:
        source: what is summed.
        target: where the result goes: ``source``, or in a reduce-scatter this member's part of it.
        dtype: of the sum.
        start: starts the collective on a copy of ``source``; returns it and where its result will be.
    """

    def __init__(
        self, source: Tensor, target: Tensor, dtype: torch.dtype, start: Callable[[Tensor], tuple[dist.Work, Tensor]]
    ) -> None:
        self._target = target
        self._work, result = start(source.to(dtype))
        self._result: Tensor | None = result

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for the collective, and cast its result back, once."""
        self._work.wait()
        if self._result is not None:
            self._target.copy_(self._result)
            self._result = None

    def get_future(self) -> Any:
        """Of the collective itself."""
        return self._work.get_future()


def start_all_reduce(flat: Tensor, group: dist.ProcessGroup, dtype: torch.dtype | None) -> PendingSum:
    """Start to sum a tensor over a group, in place.

    ``dtype``: of the sum; None, or the tensor's own, for no cast.
    """

    def start(copy: Tensor) -> tuple[dist.Work, Tensor]:
        work = dist.all_reduce(copy, group=group, async_op=True)
        assert work is not None
        return work, copy

    if dtype is None or dtype == flat.dtype:
        return start(flat)[0]
    return CastWork(flat, flat, dtype, start)
