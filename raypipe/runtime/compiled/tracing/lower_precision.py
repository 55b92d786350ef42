"""Operations in a lower precision than the parameters': norms and routers that a float64 model computes in float32.

Their results decide after seven digits what follows, so they have to round as in eager mode: they stay PyTorch's own
operations, undecomposed, and the compiler calls PyTorch's kernels for them. Casts and views are exact either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from raypipe.runtime.compiled.tracing.graphs import is_view

aten = torch.ops.aten
EXACT = (aten._to_copy.default, aten.clone.default, torch.ops.prims.convert_element_type.default)
FALLS_BACK = "should_fallback"
"""Inductor calls PyTorch's kernel for a node whose ``meta`` has this key."""


def keeps_rounding(parameters: Iterable[Tensor]) -> bool:
    """Return whether what these parameters compute in a lower precision is to round as in eager mode."""
    dtypes = {p.dtype for p in parameters if p.is_floating_point()}
    return dtypes == {torch.float64}


def undecomposed(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a decomposition table that leaves operations on tensors of a lower precision than float64 whole."""
    return {target: decompose if target in EXACT else _unless_lower(decompose) for target, decompose in table.items()}


def fall_back(graph: fx.Graph) -> int:
    """Have PyTorch's kernels compute what is in a lower precision than float64; return the number of nodes."""
    count = 0
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.target in EXACT or is_view(node):
            continue
        if any(_lower(one.meta.get("val")) for one in (node, *node.all_input_nodes)) and node.all_input_nodes:
            node.meta[FALLS_BACK] = True
            count += 1
    return count


def register_fallbacks(graph: fx.Graph) -> None:
    """Make the operations that are to fall back known to Inductor, which else expects them to be decomposed."""
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback

    nodes = (node for node in graph.nodes if node.op == "call_function")  # inputs have the meta of what they were
    for target in {node.target for node in nodes if FALLS_BACK in node.meta}:
        if target not in lowerings:
            make_fallback(  # type: ignore[no-untyped-call]
                target, constrain_to_fx_strides, warn=False, override_decomp=True
            )


def _unless_lower(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if _lower((args, kwargs)) else decompose(*args, **kwargs)

    return decomposed


def _lower(values: Any) -> bool:
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
    return any(x.is_floating_point() and x.dtype != torch.float64 for x in tensors)
