"""Compile graphs of ATen operations with Inductor, whose cache lies in raypipe's cache directory.

The cache is torch's own: keyed by the graph, the shapes, torch's version and the options, safe to share between
processes, and so between the stages of a device and the devices of a host, whose identical kernels are built once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from raypipe.runtime.compiled.program import Compiled
from raypipe.runtime.compiled.tracing.graphs import base_of, is_view, results, value
from raypipe.runtime.compiled.tracing.lower_precision import register_fallbacks

# A compiled piece that computes nothing: all its outputs are inputs in another shape.
#
# W is one where all its gradients are products, which are added by whoever runs it.

_helpers: Any = torch._C._dynamo.guards
_view = _helpers._reinterpret_tensor
"""What Inductor's programs call for a view; it takes a fifth of the time of ``torch.as_strided``."""


class View(NamedTuple):
    """One output."""

    source: int
    """The input whose memory it is."""
    size: tuple[int, ...] | None
    """None for the input itself."""
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Elements from the input's first one."""


@dataclass(frozen=True)
class Views:
    """Makes the outputs; inputs have the strides that the piece was traced with."""

    outputs: tuple[View, ...]

    def __call__(self, values: list[Tensor]) -> Sequence[Tensor]:
        """Take the inputs in a list, which is emptied, and return the outputs."""
        made = [
            values[source] if size is None else _view(values[source], size, stride, offset)
            for source, size, stride, offset in self.outputs
        ]
        values.clear()
        return made

    @property
    def source_code(self) -> str:
        """A Python module whose ``call`` does the same."""
        rows = ", ".join(repr(tuple(one)) for one in self.outputs)
        return f"from {__name__} import View, Views\n\ncall = Views(tuple(View(*one) for one in [{rows}]))\n"


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
