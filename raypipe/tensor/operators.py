"""The collectives inside a divided layer, as torch operators with gradients.

They are operators because ``torch.export`` keeps those as nodes of the graph; it would trace into a Python autograd
function and keep only its forward. They look up their group when they run. DTensor was tried instead: it dispatches
every operation of the block through Python (about twice the time of these on small layers), and exporting it needs
the processes of the group.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3: ``copy_to_group`` is its f, ``reduce_from_group`` its g.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_gathered, all_reduced, current_group, reduce_scattered


@torch.library.custom_op("raypipe::copy_to_group", mutates_args=())
def copy_to_group(x: Tensor) -> Tensor:
    """Pass a tensor that every rank holds into divided layers; its gradient is summed over the group."""
    return x.clone()


@torch.library.custom_op("raypipe::reduce_from_group", mutates_args=())
def reduce_from_group(x: Tensor, after: Tensor | None = None) -> Tensor:
    """All-reduce ``x`` over the group; the gradient is passed through to every rank."""
    return all_reduced(x.clone(memory_format=torch.contiguous_format))


@torch.library.custom_op("raypipe::gather_from_group", mutates_args=())
def gather_from_group(x: Tensor, length: int, after: Tensor | None = None) -> Tensor:
    """All-gather ``x`` along the last dimension, and truncate it to ``length``.

    Every rank computes the same from the result, so each takes its own share of the gradient.
    """
    shares = current_group().all_gather(x.contiguous())
    return torch.cat(shares, -1)[..., :length].clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("raypipe::rows_of_tensor_rank", mutates_args=())
def rows_of_tensor_rank(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Map ids to row numbers within this rank's ``rows`` of a divided table.

    Returns the row numbers, 0 for ids that other ranks hold, and a boolean mask of the ids that this rank holds.
    """
    local = ids - current_group().rank * rows
    own = (local >= 0) & (local < rows)
    return local.masked_fill(~own, 0), own


@torch.library.custom_op("raypipe::share_of_tensor_rank", mutates_args=())
def share_of_tensor_rank(x: Tensor, dim: int, length: int) -> Tensor:
    """Return this rank's ``length`` entries of a dimension, with zeros behind where it has fewer."""
    first = min(current_group().rank * length, x.shape[dim])
    own = x.narrow(dim, first, min(length, x.shape[dim] - first))
    rest = list(own.shape)
    rest[dim] = length - own.shape[dim]
    return torch.cat([own, own.new_zeros(rest)], dim) if rest[dim] else own.clone()


@copy_to_group.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@reduce_from_group.register_fake
def _(x: Tensor, after: Tensor | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gather_from_group.register_fake
def _(x: Tensor, length: int, after: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], length))


@share_of_tensor_rank.register_fake
def _(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


@rows_of_tensor_rank.register_fake
def _(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


def _copy_backward(ctx: Any, gradient: Tensor) -> Tensor:
    total: Tensor = reduce_from_group(gradient)
    return total


def _reduce_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


def _gather_setup(ctx: Any, inputs: tuple[Tensor, int, Tensor | None], output: Tensor) -> None:
    ctx.share = inputs[0].shape[-1]


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return share_of_tensor_rank(gradient, gradient.dim() - 1, ctx.share), None, None


copy_to_group.register_autograd(_copy_backward)
reduce_from_group.register_autograd(_reduce_backward)
gather_from_group.register_autograd(_gather_backward, setup_context=_gather_setup)


class _Entered(threading.local):
    """The tensor that last entered divided layers in this thread, and its copy."""

    last: tuple[Tensor, Tensor] | None = None


_entered = _Entered()


def entered(x: Tensor) -> Tensor:
    """Apply ``copy_to_group`` once for all layers that read the same tensor, as query, key and value do.

    Their gradients are then summed in one all-reduce instead of three. The next ``left`` or ``gathered`` drops the
    copy, so that it is not kept alive.
    """
    last = _entered.last
    if last is not None and last[0] is x and last[1].requires_grad == (x.requires_grad and torch.is_grad_enabled()):
        return last[1]
    copy: Tensor = copy_to_group(x)
    _entered.last = (x, copy)
    return copy


def left(partial: Tensor) -> Tensor:
    """Apply ``reduce_from_group`` at the end of divided layers."""
    _entered.last = None
    total: Tensor = reduce_from_group(partial)
    return total


def gathered(share: Tensor, length: int) -> Tensor:
    """Apply ``gather_from_group`` at the end of divided layers."""
    _entered.last = None
    whole: Tensor = gather_from_group(share, length)
    return whole


# Positions of a sequence, divided over the tensor ranks between the layers that they divide.
#
# Norms, dropout and residual sums compute each position by itself, so of T tensor ranks each can have a T-th of the
# positions (sequence parallelism). Where divided layers begin, ``gather_sequence`` gives every rank all positions;
# where they end, ``scatter_sequence`` sums what the ranks have computed and leaves each its own positions: together
# they move what an all-reduce moves. Each is the gradient of the other.
#
# Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, where
# they are g and g-bar.
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


def _sequence_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.how = inputs[1:4]


def _gather_sequence_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return scatter_sequence(gradient, *ctx.how), None, None, None, None


def _scatter_sequence_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return gather_sequence(gradient, *ctx.how), None, None, None, None


gather_sequence.register_autograd(_gather_sequence_backward, setup_context=_sequence_setup)
scatter_sequence.register_autograd(_scatter_sequence_backward, setup_context=_sequence_setup)


# Cross-entropy of logits that are divided over a group; it communicates three numbers per token, not a vocabulary.
#
# Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (the fused loss of parallel logits).
def divided_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, smoothing: float = 0.0
) -> Tensor:
    """Return ``-log p(target)`` summed over all tokens, the same scalar on every rank of the group.

    Args:
        logits: ``[tokens, rows]``, this rank's ``rows`` of the vocabulary; on the last ranks some may be padding.
        targets: int64 ``[tokens]``.
        vocabulary: number of rows over all ranks, without padding.
        ignored: target of tokens that are not counted.
        smoothing: share of a target's probability that the whole vocabulary has evenly.
    """
    loss: Tensor = cross_entropy_over_group(logits, targets, vocabulary, ignored, smoothing)[0]
    return loss


@torch.library.custom_op("raypipe::cross_entropy_over_group", mutates_args=())
def cross_entropy_over_group(
    logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, smoothing: float, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of ``divided_cross_entropy``, and the probabilities that its gradient is made from."""
    known = max(0, vocabulary - current_group().rank * logits.shape[-1])
    shifted = logits.clone()
    shifted[:, known:] = -torch.inf
    largest = shifted.amax(-1)
    all_reduced(largest, "max")
    shifted -= largest.unsqueeze(-1)
    local, own = rows_of_tensor_rank(targets, logits.shape[-1])
    target_logits = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0.0)
    all_logits = [shifted[:, :known].sum(-1)] if smoothing else []
    powers = shifted.exp_()
    sums = torch.stack([powers.sum(-1), target_logits, *all_logits])
    all_reduced(sums)
    towards = (1 - smoothing) * sums[1] + smoothing / vocabulary * sums[2] if smoothing else sums[1]
    loss = (sums[0].log() - towards).masked_fill(targets == ignored, 0.0).sum()
    return loss, powers.div_(sums[0].unsqueeze(-1))


@torch.library.custom_op("raypipe::cross_entropy_over_group_gradient", mutates_args=())
def _cross_entropy_gradient(
    probabilities: Tensor, targets: Tensor, upstream: Tensor, vocabulary: int, ignored: int, smoothing: float
) -> Tensor:
    rows = probabilities.shape[-1]
    known = max(0, vocabulary - current_group().rank * rows)
    local, own = rows_of_tensor_rank(targets, rows)
    gradient = probabilities.clone()
    share = own.to(probabilities.dtype).mul_(smoothing - 1)
    gradient.scatter_add_(-1, local.unsqueeze(-1), share.unsqueeze(-1))
    gradient[:, :known] -= smoothing / vocabulary
    return gradient.mul_((targets != ignored).unsqueeze(-1)).mul_(upstream)


@cross_entropy_over_group.register_fake
def _(
    logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, smoothing: float, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(()), torch.empty_like(logits)


@_cross_entropy_gradient.register_fake
def _(
    probabilities: Tensor, targets: Tensor, upstream: Tensor, vocabulary: int, ignored: int, smoothing: float
) -> Tensor:
    return torch.empty_like(probabilities)


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[1])
    ctx.settings = inputs[2:5]
    ctx.set_materialize_grads(False)  # of the probabilities, which nobody else reads


def _cross_entropy_backward(ctx: Any, upstream: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return _cross_entropy_gradient(*ctx.saved_tensors, upstream, *ctx.settings), None, None, None, None, None


cross_entropy_over_group.register_autograd(_cross_entropy_backward, setup_context=_cross_entropy_setup)
