"""Cut pieces out of a graph of ATen operations."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry


def ancestors(ends: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes that ``ends`` are computed from, and ``ends``; nothing behind those in ``stop``."""
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                todo += node.all_input_nodes
    return found


def extract(module: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the part of a module that computes ``outputs`` from ``inputs``, both nodes of its graph."""
    needed = ancestors(outputs, set(inputs))
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in outputs))
    graph.lint()
    return fx.GraphModule(module, graph)


def results(graph: fx.Graph) -> list[fx.Node | None]:
    """Return what a graph returns, a flat sequence."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(output.args[0])


def is_view(node: fx.Node) -> bool:
    """Return whether a node's result is its first argument's memory in another shape, which costs nothing to redo."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_product(node: fx.Node) -> bool:
    """Return whether a node costs floating-point operations that torch counts: products, convolutions, attention."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._overloadpacket in flop_registry


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's result is."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def tuples_with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes with all results of those that have several."""
    items = {user for node in nodes for user in node.users if user.target is operator.getitem}
    return nodes | items


def value(node: fx.Node) -> Tensor:
    """Return the fake tensor that a node stands for."""
    found: Tensor = node.meta["val"]
    return found


def nbytes(nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the nodes' tensors; views of one tensor count once."""
    bases: Mapping[fx.Node, fx.Node] = {base_of(node): node for node in nodes}
    return sum(value(base).numel() * value(base).element_size() for base in bases)
