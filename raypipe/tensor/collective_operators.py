"""The collectives inside a divided layer, as torch operators with gradients.

Operators, because ``torch.export`` keeps them as nodes of the graph; a Python autograd function would leave only what
its forward did. They find their group when they run. DTensor was tried instead: it dispatches every operation of the
block through Python (about twice the time of these on small layers), and exporting it needs the processes of the group.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3: ``copy_to_group`` is its f, ``reduce_from_group`` its g.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_reduced, current_group


@torch.library.custom_op("raypipe::copy_to_group", mutates_args=())
def copy_to_group(x: Tensor) -> Tensor:
    """What every member holds, where it enters divided layers; its gradient is the sum of all members'."""
    return x.clone()


@torch.library.custom_op("raypipe::reduce_from_group", mutates_args=())
def reduce_from_group(x: Tensor) -> Tensor:
    """The sum of all members' ``x``; each gets the gradient of the sum."""
    return summed(x)


@torch.library.custom_op("raypipe::gather_from_group", mutates_args=())
def gather_from_group(x: Tensor, length: int) -> Tensor:
    """All members' ``x`` behind one another along the last dimension, cut off at ``length``.

    What follows runs alike on every member, so each takes its own share of the gradient.
    """
    shares = current_group().all_gather(x.contiguous())
    return torch.cat(shares, -1)[..., :length].clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("raypipe::rows_of_tensor_rank", mutates_args=())
def rows_of_tensor_rank(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row numbers within this member's ``rows`` of a divided table, 0 for what others hold; and which are its own."""
    local = ids - current_group().rank * rows
    held = (local >= 0) & (local < rows)
    return local.masked_fill(~held, 0), held


def summed(x: Tensor) -> Tensor:
    """The sum over the group, in new memory."""
    return all_reduced(x.clone(memory_format=torch.contiguous_format))


@copy_to_group.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@reduce_from_group.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gather_from_group.register_fake
def _(x: Tensor, length: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], length))


@rows_of_tensor_rank.register_fake
def _(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


def _copy_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return summed(gradient)


def _reduce_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return gradient


def _gather_setup(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.share = inputs[0].shape[-1]


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    first = current_group().rank * ctx.share
    own = gradient[..., first : first + ctx.share]
    return torch.nn.functional.pad(own, (0, ctx.share - own.shape[-1])), None


copy_to_group.register_autograd(_copy_backward)
reduce_from_group.register_autograd(_reduce_backward)
gather_from_group.register_autograd(_gather_backward, setup_context=_gather_setup)


class _Entered(threading.local):
    """What last entered divided layers in this thread, and its copy."""

    last: tuple[Tensor, Tensor] | None = None


_entered = _Entered()


def entered(x: Tensor) -> Tensor:
    """``copy_to_group`` once for layers that read the same tensor (query, key, value): one sum of gradients, not three.

    Forgotten at the next ``left``, so that nothing is kept alive.
    """
    last = _entered.last
    if last is not None and last[0] is x and last[1].requires_grad == (x.requires_grad and torch.is_grad_enabled()):
        return last[1]
    copy: Tensor = copy_to_group(x)
    _entered.last = (x, copy)
    return copy


def left(partial: Tensor) -> Tensor:
    """``reduce_from_group`` at the end of divided layers."""
    _entered.last = None
    total: Tensor = reduce_from_group(partial)
    return total


def gathered(share: Tensor, length: int) -> Tensor:
    """``gather_from_group`` at the end of divided layers."""
    _entered.last = None
    whole: Tensor = gather_from_group(share, length)
    return whole
