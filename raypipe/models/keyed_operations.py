"""Replace the random operations of a captured model, dropout and dropout inside attention, by keyed ones.

A site is numbered by the position of its operation among the random operations of the whole model, so that masks do
not depend on the cut. Other random operations are rejected, because their results would depend on the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from raypipe.errors import CaptureError
from raypipe.graph.attention import ATTENTION
from raypipe.graph.dims import Dim, Sizes, evaluate_all
from raypipe.graph.operations import Operation, OperationGraph, TensorType
from raypipe.models.keyed_random import in_training, keyed_dropout

DROPOUT = "aten.dropout.default"


class Site(NamedTuple):
    """The place of a random operation, and the layout of the tensor it drops values of."""

    number: int
    batch_dim: int | None
    """Dimension that holds the samples; None if there is none."""
    divided_dim: int | None = None
    """Dimension that is divided over tensor ranks; None if every rank has the whole tensor."""
    longest: tuple[int, ...] | None = None
    """Shape for one of the longest samples."""


def random_shapes(graph: OperationGraph, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that a model's random operations drop values of, in order."""
    return [
        evaluate_all(_dropped_from(graph, o, o.type), sizes)
        for o in graph.operations
        if o.random and o.type is not None and o.target in (DROPOUT, ATTENTION)
    ]


def find_sites(
    graph: OperationGraph, small: Sizes, large: Sizes, whole: Sequence[tuple[int, ...]] | None = None
) -> dict[str, Site]:
    """Find the random operations of a model, by name.

    Args:
        graph: the model.
        small: its sizes for some number of samples.
        large: its sizes for twice as many samples.
        whole: for a divided model, the ``random_shapes`` of the undivided one at size ``small``; a dimension in which
            the shapes differ is divided.

    Raises:
        CaptureError: an operation draws random numbers in a way that random keys cannot reproduce.
    """
    found: dict[str, Site] = {}
    for operation in graph.operations:
        if not operation.random:
            continue
        if operation.target not in (DROPOUT, ATTENTION) or operation.type is None:
            where = ", ".join(p for p in (f"operation {operation.name}", operation.module, operation.source) if p)
            why = f"{operation.target} draws random numbers that would depend on the process that runs it"
            raise CaptureError(where, why, "use torch.nn.Dropout, or switch it off in the model's configuration")
        few, many = (evaluate_all(_dropped_from(graph, operation, operation.type), sizes) for sizes in (small, large))
        dims = [d for d, (a, b) in enumerate(zip(few, many, strict=True)) if b == 2 * a]
        undivided = few if whole is None else whole[len(found)]
        shares = [d for d, (a, b) in enumerate(zip(few, undivided, strict=True)) if a != b]
        batch = dims[0] if dims else None
        longest = tuple(n // 2 if d == batch else n for d, n in enumerate(few))
        found[operation.name] = Site(len(found), batch, shares[0] if shares else None, longest)
    return found


def _dropped_from(graph: OperationGraph, operation: Operation, made: TensorType) -> tuple[Dim, ...]:
    """Return the shape of the tensor whose values it drops: its result, or the attention weights."""
    if operation.target == DROPOUT:
        return made.shape
    key = graph.operations[operation.inputs[1]].type
    assert key is not None, "attention reads tensors"
    return (*made.shape[:-1], key.shape[-2])


def key_random_operations(module: fx.GraphModule, sites: dict[str, Site]) -> None:
    """Replace each random operation of a graph by its keyed counterpart, in place."""
    for node in module.graph.nodes:
        site = sites.get(node.name) if node.op == "call_function" else None
        if site is None:
            continue
        if node.target is torch.ops.aten.dropout.default:
            x, p = node.args[:2]
            node.target, node.args, node.kwargs = keyed_dropout, (x, p, *site), {}
        else:
            node.target, node.kwargs = keyed_attention, {**node.kwargs, "site": site}
    module.recompile()


def keyed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    site: Site,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` with dropout from ``random_keys``.

    Shapes are ``[..., queries, width]`` and ``[..., keys, width]``. No kernel accepts a dropout mask, so in training
    the scores are materialised; in evaluation torch's kernel runs.
    """
    if not in_training():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    # A row whose keys are all masked becomes zeros, as in the kernels.
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return keyed_dropout(weights, dropout_p, *site) @ value
