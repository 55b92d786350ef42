"""Cross-entropy of logits that are divided over a group; it communicates three numbers per token, not a vocabulary.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (the fused loss of parallel logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_reduced, current_group, rows_of_tensor_rank


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
