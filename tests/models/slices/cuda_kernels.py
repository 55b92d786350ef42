"""What torch's attention kernels for GPUs do, without one: the sums in full, and what they ask of their arguments.

From ``aten/src/ATen/native/transformers/cuda``: ``mha_fwd`` and ``mha_bwd`` of flash attention, and
``_efficient_attention_forward`` and ``_efficient_attention_backward``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    assert query.stride(-1) == key.stride(-1) == 1
    scores = query @ key.mT * _scale(query, scale)
    if causal:
        assert query.shape[2] == key.shape[2], "torch refuses flash attention that is causal and not square"
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores


def _laid_out(x: Tensor) -> Tensor:
    """As kernels return it: ``[batch, positions, heads, width]`` in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    given: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, weights: Tensor, scale: float | None
) -> list[Tensor]:
    by_score = weights * (given @ value.mT - (given * out).sum(-1, keepdim=True)) * _scale(query, scale)
    return [by_score @ key, by_score.mT @ query, weights.mT @ given]


class CudaKernels:
    """In the place of ``torch.ops.aten``."""

    def _scaled_dot_product_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, *, scale: float | None
    ) -> tuple[Any, ...]:
        groups = self._check_flash(query, key, value, dropout)
        scores = _scores(query, key.repeat_interleave(groups, 1), causal, scale)
        out = scores.softmax(-1) @ value.repeat_interleave(groups, 1)
        sizes = query.shape[2], key.shape[2]
        return _laid_out(out), scores.logsumexp(-1), None, None, *sizes, query.new_empty(2), query.new_empty(0), None

    def _scaled_dot_product_flash_attention_backward(
        self, given: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any,
        scale: float | None,
    ) -> list[Tensor]:  # fmt: skip
        no, none, queries, keys, dropout, causal, _, _ = rest
        assert (no, none, queries, keys) == (None, None, query.shape[2], key.shape[2])
        groups = self._check_flash(query, key, value, dropout)
        assert lse.is_contiguous()
        assert given.shape == out.shape == query.shape
        wide = [x.repeat_interleave(groups, 1) for x in (key, value)]
        weights = (_scores(query, wide[0], causal, scale) - lse.unsqueeze(-1)).exp()
        to_query, *others = _backward(given, query, *wide, out, weights, scale)
        return [to_query, *(x.unflatten(1, (-1, groups)).sum(2) for x in others)]

    @staticmethod
    def _check_flash(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> int:
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        assert key.shape == value.shape
        assert dropout == 0
        assert query.shape[1] % key.shape[1] == 0
        return query.shape[1] // key.shape[1]

    def _scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: None, sums: bool, dropout: float, causal: bool, *,
        scale: float | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert (bias, sums, dropout) == (None, True, 0)
        scores = _scores(query, key, causal, scale)
        padded = torch.full((*query.shape[:2], -(-query.shape[2] // 32) * 32), math.inf, dtype=query.dtype)
        padded[..., : query.shape[2]] = scores.logsumexp(-1)
        return _laid_out(scores.softmax(-1) @ value), padded, query.new_empty(()), query.new_empty(())

    def _scaled_dot_product_efficient_attention_backward(
        self, given: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: None, out: Tensor, lse: Tensor,
        seed: None, offset: None, dropout: float, wanted: list[bool], causal: bool, *, scale: float | None,
    ) -> list[Tensor | None]:  # fmt: skip
        assert (bias, seed, offset, dropout, wanted) == (None, None, None, 0, [True, True, True, False])
        assert query.shape[1] == key.shape[1] == value.shape[1]
        assert out.transpose(1, 2).is_contiguous(), "the kernel knows no other layout"
        assert lse.is_contiguous()
        assert lse.shape[2] == -(-query.shape[2] // 32) * 32
        assert torch.isinf(lse[..., query.shape[2] :]).all()
        weights = (_scores(query, key, causal, scale) - lse[..., : query.shape[2], None]).exp()
        return [*_backward(given, query, key, value, out, weights, scale), None]
