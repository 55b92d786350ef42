"""Compile graphs of ATen operations with Inductor, whose cache lies in raypipe's cache directory.

The cache is torch's own: keyed by the graph, the shapes, torch's version and the options, safe to share between
processes, and so between the stages of a device and the devices of a host, whose identical kernels are built once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.runtime.compiled.inductor.views import View, Views
from raypipe.runtime.compiled.program import Compiled
from raypipe.runtime.compiled.tracing.graphs import base_of, is_view, results, value
from raypipe.runtime.compiled.tracing.lower_precision import register_fallbacks


def compile_graph(graph: fx.GraphModule, fake: FakeTensorMode, backward: bool) -> Compiled:
    """Compile a graph without operations in place, whose outputs are a flat tuple of tensors.

    Outputs have the strides that they have in eager mode, since another piece is compiled for them.

    Raises:
        Exception: whatever Inductor raises.
    """
    views = views_of(graph.graph)
    if views is not None:
        return views
    from torch._inductor.compile_fx import compile_fx_inner

    register_fallbacks(graph.graph)
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [value(node) for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(fake)), torch.no_grad():
        compiled: Any = compile_fx_inner(graph, inputs, is_backward=backward, is_inference=False)
    return compiled  # type: ignore[no-any-return]


def views_of(graph: fx.Graph) -> Views | None:
    """Return what makes the outputs of a graph that computes nothing; None if it computes something."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if any(node.op not in ("placeholder", "output") and not is_view(node) for node in graph.nodes):
        return None
    found = []
    for node in results(graph):
        assert node is not None
        base = base_of(node)
        made, held = value(node), value(base)
        if made.dtype != held.dtype or made.is_conj() != held.is_conj() or made.is_neg() != held.is_neg():
            return None
        offset = int(made.storage_offset() - held.storage_offset())
        own = node is base
        found.append(View(inputs.index(base), None if own else tuple(made.shape), () if own else made.stride(), offset))
    return Views(tuple(found))
