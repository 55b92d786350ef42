"""Compile graphs of ATen operations with Inductor, whose cache lies in raypipe's cache directory.

The cache is torch's own: keyed by the graph, the shapes, torch's version and the options, safe to share between
processes, and so between the stages of a device and the devices of a host, whose identical kernels are built once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.graph.captured_files import cache_folder
from raypipe.runtime.compiled.graphs import is_view, value

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes the inputs in a list, which it empties; returns the outputs."""
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Torch's variable for the directory of its cache; what the user has set stays as it is."""


def use_cache() -> None:
    """Keep compiled programs below raypipe's cache directory; call it before anything is compiled."""
    os.environ.setdefault(VARIABLE, str(cache_folder().parent / "compiled"))


def compile_graph(graph: fx.GraphModule, fake: FakeTensorMode, backward: bool) -> Compiled:
    """Compile a graph without operations in place, whose outputs are a flat tuple of tensors.

    Outputs have the strides that they have in eager mode, since another piece is compiled for them.

    Raises:
        Exception: whatever Inductor raises.
    """
    if not any(node.op == "call_function" and not is_view(node) for node in graph.graph.nodes):
        run = graph.forward
        return lambda values: run(*values)
    from torch._inductor.compile_fx import compile_fx_inner

    output = next(iter(reversed(graph.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    inputs = [value(node) for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(fake)), torch.no_grad():
        compiled: Any = compile_fx_inner(graph, inputs, is_backward=backward, is_inference=False)
    return compiled  # type: ignore[no-any-return]
