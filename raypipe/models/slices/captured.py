"""Let a captured stage run on slices: its causal attention, its positions and its dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from raypipe.models.keyed_draws import Site
from raypipe.models.keyed_operations import keyed_attention
from raypipe.models.keyed_random import keyed_dropout
from raypipe.models.slices.attention import Dropped, causal_attention
from raypipe.models.slices.current import current_slice

aten = torch.ops.aten


def run_on_slices(module: fx.GraphModule, along: dict[str, int | None]) -> None:
    """Replace what depends on where a slice is, in place.

    Args:
        module: a stage, whose random operations are keyed.
        along: per operation, the dimension of its result along which the sequence lies (``graph.sequence_flow``).
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = _attention
        elif node.target is keyed_attention:
            node.target = _dropping_attention
        elif node.target in (aten.arange.default, aten.arange.start):
            node.target = _positions
        elif node.target is keyed_dropout:
            node.kwargs = {**node.kwargs, "sequence_dim": along[node.name]}
    module.recompile()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = True,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    return causal_attention(query, key, value, scale, enable_gqa)


def _dropping_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = True,
    *, scale: float | None = None, enable_gqa: bool = False, site: Site,
) -> Tensor:  # fmt: skip
    if current_slice() is None:
        return keyed_attention(query, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa, site=site)
    return causal_attention(query, key, value, scale, enable_gqa, Dropped(dropout_p, site))


def _positions(*args: Any, **kwargs: Any) -> Tensor:
    """``arange`` over the positions of the slice; it counts from 0 and ends with the sequence."""
    places = torch.arange(args[-1], **{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
    run = current_slice()
    return places if run is None else places + run.first_position(int(args[-1]))
