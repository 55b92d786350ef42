"""Cross-entropy of logits that are divided over a group; it communicates three numbers per token, not a vocabulary.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (the fused loss of parallel logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_reduced, current_group


def divided_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, smoothing: float = 0.0
) -> Tensor:  # fmt: skip
    """Return ``-log p(target)`` summed over all tokens, the same scalar on every rank of the group.

    Args:
        logits: ``[tokens, rows]``, this rank's ``rows`` of the vocabulary; on the last ranks some may be padding.
        targets: int64 ``[tokens]``.
        vocabulary: number of rows over all ranks, without padding.
        ignored: target of tokens that are not counted.
        smoothing: share of a target's probability that the whole vocabulary has evenly.
    """
    loss: Tensor = _DividedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, vocabulary, ignored, smoothing
    )
    return loss


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, ignored: int, smoothing: float
    ) -> Tensor:  # fmt: skip
        rows = logits.shape[-1]
        first = current_group().rank * rows
        shifted = logits.clone()
        known = max(0, vocabulary - first)
        shifted[:, known:] = -torch.inf
        largest = shifted.amax(-1)
        all_reduced(largest, "max")
        shifted -= largest.unsqueeze(-1)
        local = targets - first
        own = (local >= 0) & (local < rows)
        local = local.masked_fill(~own, 0)
        target_logits = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0.0)
        all_logits = [shifted[:, :known].sum(-1)] if smoothing else []
        powers = shifted.exp_()
        sums = torch.stack([powers.sum(-1), target_logits, *all_logits])
        all_reduced(sums)
        counted = targets != ignored
        ctx.known, ctx.smoothing, ctx.vocabulary = known, smoothing, vocabulary
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), local, own, counted)
        towards = (1 - smoothing) * sums[1] + smoothing / vocabulary * sums[2] if smoothing else sums[1]
        return (sums[0].log() - towards).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, local, own, counted = ctx.saved_tensors
        gradient = probabilities.clone()
        share = own.to(probabilities.dtype).mul_(ctx.smoothing - 1)
        gradient.scatter_add_(-1, local.unsqueeze(-1), share.unsqueeze(-1))
        gradient[:, : ctx.known] -= ctx.smoothing / ctx.vocabulary
        return gradient.mul_(counted.unsqueeze(-1)).mul_(gradients[0]), None, None, None, None
