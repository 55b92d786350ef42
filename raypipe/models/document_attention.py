"""Attention of packed rows, one document at a time, where the mask says that none sees another.

A kernel that is given a mask computes the scores of a whole row, also those that are hidden: for rows of many short
documents nearly all. Each document alone is causal attention, for which kernels need no mask. GPUs and compiled stages
keep the mask: where documents begin would have to come to the host first.
"""

from __future__ import annotations

import threading
import weakref
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, fx

Documents = tuple[tuple[int, ...], ...]
"""Per row, where each document begins, and the length of the row."""


def attend_by_document(module: fx.GraphModule) -> None:
    """Let attention that is given a mask, and draws nothing, go document by document, in place."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            node.target = document_attention
    module.recompile()


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention``; ``[rows, heads, tokens, width]``."""
    documents = None if attn_mask is None else _known(attn_mask)
    if documents is None or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    rows = []
    for row in range(query.shape[0]):
        begins = documents[row if len(documents) > 1 else 0]
        sizes = [b - a for a, b in pairwise(begins)]
        parts = zip(*(t[row : row + 1].split_with_sizes(sizes, -2) for t in (query, key, value)), strict=True)
        made = [
            F.scaled_dot_product_attention(q, k, v, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa)
            for q, k, v in parts
        ]
        rows.append(torch.cat(made, -2))
    return torch.cat(rows)


class _Newest(threading.local):
    """The mask that was read last: all layers of a stage are given the same."""

    mask: weakref.ref[Tensor] | None = None
    documents: Documents | None = None


_newest = _Newest()


def _known(mask: Tensor) -> Documents | None:
    if _newest.mask is None or _newest.mask() is not mask:
        _newest.mask, _newest.documents = weakref.ref(mask), documents_of(mask)
    return _newest.documents


def documents_of(mask: Tensor) -> Documents | None:
    """Return where the documents of each row begin, if each token sees exactly those before it in its document.

    Args:
        mask: whether a query (the dimension before the last) sees a key; ``[rows, 1, tokens, tokens]``.

    >>> documents_of(torch.tensor([[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]).bool())
    ((0, 2, 3),)
    """
    if type(mask) is not Tensor or mask.device.type != "cpu" or mask.dtype != torch.bool or mask.dim() != 4:
        return None
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3]:
        return None
    seen, tokens = mask[:, 0], torch.arange(mask.shape[3])
    first = seen.to(torch.uint8).argmax(-1)
    if not torch.equal(seen, (tokens >= first.unsqueeze(-1)) & (tokens <= tokens.unsqueeze(-1))):
        return None
    if not torch.equal(first.gather(-1, first), first) or bool((first.diff() < 0).any()):  # a window, say
        return None
    return tuple((*torch.unique(row).tolist(), len(tokens)) for row in first)
