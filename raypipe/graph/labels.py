"""Label a sub-graph by its operations and by the paths of its modules."""

from __future__ import annotations

from collections import Counter

from raypipe.graph.flops import matrix_flops, short_name
from raypipe.graph.operations import OperationGraph

ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "softmax", "_softmax")
CONVOLUTION = ("conv1d", "conv2d", "conv3d", "convolution")


def label(graph: OperationGraph, span: range) -> str:
    """Return a sub-graph's label.

    It is ``embedding``, ``stem``, ``attention``, ``mlp``, ``convolution``, ``block``, ``head``, or its module's path. A
    sub-graph is inside a block of the model if most of its operations with parameters are.
    """
    holders = [i for i in span if graph.parameters_of([graph.operations[i]])]
    names = {short_name(graph.operations[i].target) for i in span}
    products = [i for i in span if matrix_flops(graph, graph.operations[i], graph.example)]
    if not products:
        return "embedding" if "embedding" in names else _path(graph, holders or list(span))
    inside = Counter(bool(graph.blocks[i]) for i in holders)
    if graph.layers and inside[False] >= inside[True]:
        return _outside(graph, span, holders)
    attends = any(name in ATTENTION for name in names)
    if not graph.layers:
        return _path(graph, holders)
    if attends:
        return "block" if _has_mlp_too(graph, holders) else "attention"
    return "convolution" if names & set(CONVOLUTION) else "mlp"


def _outside(graph: OperationGraph, span: range, holders: list[int]) -> str:
    inside = [i for i, block in enumerate(graph.blocks) if block]
    if span.start <= inside[0]:
        return "embedding" if any("embed" in graph.operations[i].module.lower() for i in holders) else "stem"
    return "head" if span.stop > inside[-1] else _path(graph, holders)


def _has_mlp_too(graph: OperationGraph, holders: list[int]) -> bool:
    """Return whether a sub-graph with attention has parameters of an MLP too, judging by its modules' names."""
    parents = {".".join(graph.operations[i].module.split(".")[: len(graph.blocks[i].split(".")) + 1]) for i in holders}
    return any("mlp" in parent.lower() or "feed_forward" in parent.lower() for parent in parents)


def _path(graph: OperationGraph, numbers: list[int]) -> str:
    """Return the longest common path of these operations' modules, or the first one's path."""
    paths = [graph.operations[i].module.split(".") for i in numbers if graph.operations[i].module]
    if not paths:
        return "model"
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared or paths[0])
