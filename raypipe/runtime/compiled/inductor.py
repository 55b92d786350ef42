"""Compile graphs of ATen operations with Inductor, whose cache lies in raypipe's cache directory.

The cache is torch's own: keyed by the graph, the shapes, torch's version and the options, safe to share between
processes, and so between the stages of a device and the devices of a host, whose identical kernels are built once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.runtime.compiled.program import Compiled
from raypipe.runtime.compiled.tracing.graphs import is_view, value
from raypipe.runtime.compiled.tracing.lower_precision import register_fallbacks


class Views:
    """A graph that computes nothing."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._forward = graph.forward
        self.source_code = (
            f"import torch\nfrom torch import device\n{graph.code}\ndef call(args):\n    return forward(None, *args)\n"
        )

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        """Return views of the inputs."""
        made: Sequence[Tensor] = self._forward(*values)
        return made


def compile_graph(graph: fx.GraphModule, fake: FakeTensorMode, backward: bool) -> Compiled:
    """Compile a graph without operations in place, whose outputs are a flat tuple of tensors.

    Outputs have the strides that they have in eager mode, since another piece is compiled for them.

    Raises:
        Exception: whatever Inductor raises.
    """
    if not any(node.op == "call_function" and not is_view(node) for node in graph.graph.nodes):
        return Views(graph)
    from torch._inductor.compile_fx import compile_fx_inner

    register_fallbacks(graph.graph)
    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [value(node) for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(fake)), torch.no_grad():
        compiled: Any = compile_fx_inner(graph, inputs, is_backward=backward, is_inference=False)
    return compiled  # type: ignore[no-any-return]
