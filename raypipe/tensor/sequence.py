"""Operators that divide the positions of a sequence over the tensor ranks, between the layers that they divide.

Norms, dropout and residual sums compute each position by itself, so of T tensor ranks each can have a T-th of the
positions (sequence parallelism). Where divided layers begin, ``gather_sequence`` gives every rank all positions; where
they end, ``scatter_sequence`` sums what the ranks have computed and leaves each its own positions: together they move
what an all-reduce moves. Each is the gradient of the other.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, where
they are g and g-bar.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_gathered, current_group, reduce_scattered


@torch.library.custom_op("raypipe::gather_sequence", mutates_args=())
def gather_sequence(x: Tensor, dim: int, size: int, summed: bool, after: Tensor | None = None) -> Tensor:
    """All-gather the positions of a sequence, which lie along ``dim``, over a group of ``size``.

    ``summed``: each rank computes its own share from the result, so their gradients are summed. Otherwise all compute
    the same, and each takes its own positions of the gradient.
    """
    shares = all_gathered(x.movedim(dim, 0).contiguous())
    return shares.flatten(0, 1).movedim(0, dim).contiguous()


@torch.library.custom_op("raypipe::scatter_sequence", mutates_args=())
def scatter_sequence(x: Tensor, dim: int, size: int, summed: bool, after: Tensor | None = None) -> Tensor:
    """Return this rank's positions of a sequence, which lie along ``dim``; ``summed``: of the sum over all ranks."""
    moved = x.movedim(dim, 0)
    shares = moved.reshape(size, -1, *moved.shape[1:])
    own = reduce_scattered(shares.contiguous()) if summed else shares[current_group().rank]
    return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)


@gather_sequence.register_fake
def _(x: Tensor, dim: int, size: int, summed: bool, after: Tensor | None = None) -> Tensor:
    return x.new_empty([n * size if d == dim else n for d, n in enumerate(x.shape)])


@scatter_sequence.register_fake
def _(x: Tensor, dim: int, size: int, summed: bool, after: Tensor | None = None) -> Tensor:
    return x.new_empty([n // size if d == dim else n for d, n in enumerate(x.shape)])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[1:4]


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return scatter_sequence(gradient, *ctx.how), None, None, None, None


def _scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gather_sequence(gradient, *ctx.how), None, None, None, None


gather_sequence.register_autograd(_gather_backward, setup_context=_setup)
scatter_sequence.register_autograd(_scatter_backward, setup_context=_setup)
