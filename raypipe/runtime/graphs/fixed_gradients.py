"""Gradients that lie in the same memory in every step, so that a graph can add to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class FixedGradients:
    """The gradients of one stage replica's parameters.

    Those that are summed over devices lie in flat tensors already (``update.flat_gradients``), which only have to last.

    Args:
        elsewhere: parameters whose gradients others hold, in memory that lasts.
    """

    def __init__(self, elsewhere: Collection[Tensor] = ()) -> None:
        self._elsewhere = frozenset(elsewhere)
        self._own: dict[Tensor, Tensor] = {}

    def open(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Let gradients accumulate in their memory from now until they are dropped; return them, in order.

        What has been computed elsewhere in this step is copied there; a first gradient of a step is added to zeros.
        """
        fresh = []
        for p in parameters:
            if p in self._elsewhere:
                continue
            own = self._own.get(p)
            if own is None:
                own = self._own[p] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            if p.grad is own:
                continue
            if p.grad is None:
                fresh.append(own)
            else:
                own.copy_(p.grad)
            p.grad = own
        if fresh:
            torch._foreach_zero_(fresh)
        found = [p.grad for p in parameters]
        assert all(gradient is not None for gradient in found), "whoever sums gradients has opened them"
        return [gradient for gradient in found if gradient is not None]
