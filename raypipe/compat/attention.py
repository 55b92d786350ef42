"""Attention of queries over one piece of keys and values, with the log of the sum of exponentials of its scores.

With these sums, results over several pieces add up to the attention over all of them. Fused kernels make no scores, and
return the sums; torch's public functions keep them to themselves, but for flex attention, which makes scores unless
TorchInductor compiles it. So the kernels behind ``F.scaled_dot_product_attention`` are called by their private names,
as torch's own ring attention does. Which of them takes the tensors is torch's answer (``torch.backends.cuda``): what a
user has switched off stays off.

Where none does (float64, or heads 4 values wide, on GPUs; keys and values of unequal widths on CPUs; a mask of dropped
weights), the scores of the piece are made.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

aten = torch.ops.aten
FLASH_WIDTH = 8
"""Flash attention's heads are a multiple of this wide; ``F.scaled_dot_product_attention`` pads others."""
EFFICIENT_ROWS = 32
"""The log-sum-exp of memory-efficient attention is padded to a multiple of this, with infinities."""


def fused_kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> Literal["cpu", "flash", "efficient"] | None:
    """Return the kernel that takes these tensors; flash attention alone lets heads of queries share one of keys."""
    if query.device.type != "cuda":
        alike = query.shape[-1] == value.shape[-1] == key.shape[-1]
        return "cpu" if query.device.type == "cpu" and alike else None
    flash = SDPAParams(query, key, value, None, 0.0, causal, query.shape[1] != key.shape[1])
    if query.shape[-1] % FLASH_WIDTH == 0 and can_use_flash_attention(flash):
        return "flash"
    keys, values = (x.narrow(1, 0, 1).expand(-1, query.shape[1], -1, -1) for x in (key, value))
    repeated = SDPAParams(query, keys, values, None, 0.0, causal, False)
    return "efficient" if can_use_efficient_attention(repeated) else None


def piece_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the queries' attention over one piece, and the log-sum-exp of its scores: ``[batch, heads, queries]``.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, heads, keys, width]``; or of fewer heads, each for several of the queries'.
        causal: whether query i sees keys 0 to i only; there are as many of both.
        scale: of the scores; None: 1 / sqrt(width).
        mask: what the weights are multiplied by, ``[batch, heads, queries, keys]``.
    """
    kernel = fused_kernel(query, key, value, causal) if mask is None else None
    if kernel == "flash":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    key, value = _all_heads(key, query), _all_heads(value, query)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, lse
    if kernel == "efficient":
        run = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = run(query, key, value, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : query.shape[2]]
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    if mask is not None:
        weights.mul_(mask)
    return weights.to(value.dtype) @ value, lse


def piece_gradients(
    given: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    total: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what one piece gives to the gradients of queries, keys and values; arguments as in ``piece_attention``.

    ``total`` and ``lse`` are those over all pieces, and ``given`` is the gradient of ``total``: with them, the weights
    of the piece are those in the whole.
    """
    kernel, heads = fused_kernel(query, key, value, causal) if mask is None else None, key.shape[1]
    if kernel == "flash":  # None: where sequences of unequal lengths begin, and the state of a dropout
        sizes = query.shape[2], key.shape[2]
        to_query, to_key, to_value = aten._scaled_dot_product_flash_attention_backward(
            given, query, key, value, total, lse.contiguous(), None, None, *sizes, 0.0, causal, None, None, scale=scale
        )
        return to_query, to_key, to_value
    key, value = _all_heads(key, query), _all_heads(value, query)
    if kernel == "cpu":
        to_query, to_key, to_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given.contiguous(), query, key, value, total, lse, 0.0, causal, scale=scale
        )
    elif kernel == "efficient":
        padded = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_ROWS), value=math.inf).contiguous()
        total = total.transpose(1, 2).contiguous().transpose(1, 2)  # in the layout that the kernel's forward returns
        run, wanted = aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
        to_query, to_key, to_value, _ = run(
            given, query, key, value, None, total, padded, None, None, 0.0, wanted, causal, scale=scale
        )
    else:
        weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
        by_weight = given.to(weights.dtype) @ value.transpose(-2, -1).to(weights.dtype)
        kept = weights
        if mask is not None:
            by_weight, kept = by_weight * mask, weights * mask
        back = weights * (by_weight - (given * total).sum(-1, keepdim=True)) * _scale(query, scale)
        to_query = back.to(key.dtype) @ key
        to_key = back.transpose(-2, -1).to(query.dtype) @ query
        to_value = kept.transpose(-2, -1).to(given.dtype) @ given
    return to_query, _own_heads(to_key, heads), _own_heads(to_value, heads)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Return the scores of a piece in float32 or more; -inf where a position would see a later one."""
    scores = (query @ key.transpose(-2, -1)) * _scale(query, scale)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _all_heads(x: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values for all the heads of queries that share them."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _own_heads(gradient: Tensor, heads: int) -> Tensor:
    """Add up the gradients of the repeated heads."""
    batch, repeated, *rest = gradient.shape
    return gradient if repeated == heads else gradient.reshape(batch, heads, repeated // heads, *rest).sum(2)
