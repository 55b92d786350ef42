"""Cross entropy of logits that are divided over a group: what travels is three numbers per token, not a vocabulary.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3 (the fused loss of parallel logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import all_reduced, current_group


def divided_cross_entropy(logits: Tensor, targets: Tensor, vocabulary: int, ignored: int) -> Tensor:
    """Sum over all tokens of ``-log p(target)``, the same number on every member of the group.

    ``logits`` ``[tokens, rows]``: this member's ``rows`` of the vocabulary, of which the last members' may lie beyond
    it; ``targets`` int64 ``[tokens]``, ``ignored`` where there is nothing to predict.
    """
    loss: Tensor = _DividedCrossEntropy.apply(logits, targets, vocabulary, ignored)  # type: ignore[no-untyped-call]
    return loss


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocabulary: int, ignored: int) -> Tensor:
        rows = logits.shape[-1]
        first = current_group().rank * rows
        shifted = logits.clone()
        shifted[:, max(0, vocabulary - first) :] = -torch.inf
        largest = shifted.amax(-1)
        all_reduced(largest, "max")
        shifted -= largest.unsqueeze(-1)
        local = targets - first
        held = (local >= 0) & (local < rows)
        local = local.masked_fill(~held, 0)
        hit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~held, 0.0)
        powers = shifted.exp_()
        sums = torch.stack([powers.sum(-1), hit])
        all_reduced(sums)
        kept = targets != ignored
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), local, held, kept)
        return (sums[0].log() - sums[1]).masked_fill(~kept, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, held, kept = ctx.saved_tensors
        gradient = shares.clone()
        gradient.scatter_add_(-1, local.unsqueeze(-1), held.to(shares.dtype).neg().unsqueeze(-1))
        return gradient.mul_(kept.unsqueeze(-1)).mul_(gradients[0]), None, None, None
