"""The whole model, eager and unmodified, on the whole mini-batch; its dropout draws from the same keys.

Random operations are counted in the order in which eager PyTorch runs them. Attention with dropout is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.models import random_keys
from raypipe.models.keyed_random import KeyedDropout


@contextmanager
def keyed(seed: int, step: int, rows: int) -> Iterator[None]:
    """Dropout in this block draws by key; the n-th place that drops is site n."""
    sites = iter(range(1_000_000))
    plain, attention = F.dropout, F.scaled_dot_product_attention

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return KeyedDropout(p, next(sites))(x) if training and p else x

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not dropout_p:
            return attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        groups = q.shape[1] // k.shape[1]
        k, v = (torch.stack([t] * groups, 2).flatten(1, 2) for t in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
        if is_causal:
            attn_mask = torch.tril(torch.ones(scores.shape[-2:], dtype=torch.bool))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(scores).masked_fill(~attn_mask, float("-inf"))
        weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", dropout(weights, dropout_p), v)

    F.dropout, F.scaled_dot_product_attention = dropout, attend
    try:
        with random_keys(seed, step, range(rows), training=True):
            yield
    finally:
        F.dropout, F.scaled_dot_product_attention = plain, attention


def with_values(module: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """The module with these parameters, by the names it gives them itself; a tied one by any of its names."""
    with torch.no_grad():
        left = set(values)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in values:
                parameter.copy_(values[name])
                left.discard(name)
    assert not left, f"the module has no {left}"
    return module
