"""Find the operations of a stage's graph whose weight gradients can wait, and what their weights are made of.

The rules are those of ``capture/weight_gradients.py``, by which ``raypipe partition`` counts what stays in B; here they
hold within one stage, where an expression counts only if nothing but deferred products reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from raypipe.capture.weight_gradients import GATHERS, PLACES
from raypipe.graph.flops import short_name


@dataclass
class Weights:
    """The deferrable operations of a graph."""

    places: dict[fx.Node, tuple[int, ...]]
    """Per operation, the positions of its weights among its flattened arguments."""
    roots: dict[fx.Node, tuple[fx.Node, ...]]
    """Per parameter and weight expression, the parameters that it is made of."""

    @staticmethod
    def leaf(node: fx.Node, place: int) -> fx.Node:
        """Return the argument at a position."""
        found: fx.Node = _leaves(node)[place]
        return found


def find_weights(graph: fx.Graph, read: Mapping[fx.Node, nn.Parameter]) -> Weights:
    """Find the operations whose weights are parameters (``read``) or made of these alone."""
    roots = _expressions(graph, read)
    while True:
        places = {node: at for node in graph.nodes if (at := _places(node, roots)) and node not in roots}
        bad = {
            node for node in roots if node not in read and not all(_waits(node, u, places, roots) for u in node.users)
        }
        if not bad:
            break
        for node in bad:
            del roots[node]
    return Weights(places, roots)


def _waits(node: fx.Node, user: fx.Node, places: Mapping[fx.Node, tuple[int, ...]], roots: Collection[fx.Node]) -> bool:
    if user in roots:
        return True
    return user in places and all(i in places[user] for i, leaf in enumerate(_leaves(user)) if leaf is node)


def _expressions(graph: fx.Graph, read: Mapping[fx.Node, nn.Parameter]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return parameters and everything made of them alone, with the parameters that it is made of."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {n: (n,) for n in read}
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        inputs = node.all_input_nodes
        whole = all(n in found or n.op == "get_attr" for n in inputs) and any(n in found for n in inputs)
        gathered = node.args and node.args[0] in found and name_of(node) in GATHERS
        if whole or gathered:
            found[node] = tuple(dict.fromkeys(root for n in inputs for root in found.get(n, ())))
    return found


def _places(node: fx.Node, roots: Collection[fx.Node]) -> tuple[int, ...]:
    """Return the positions of an operation's weights; () if it has none, or all its tensors are weights."""
    positions = PLACES.get(name_of(node)) if node.op == "call_function" else None
    if positions is None:
        return ()
    leaves = _leaves(node)
    owners = _owners(node)
    found = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf in roots and owners[i] in positions
    ]
    two_factors = name_of(node) in ("mm", "bmm", "matmul")
    return tuple(found[:1] if two_factors else found)


def name_of(node: fx.Node) -> str:
    """Return the short name of the operation that a node calls."""
    return short_name(str(node.target))


def _leaves(node: fx.Node) -> list[Any]:
    found: list[Any] = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    return found


def _owners(node: fx.Node) -> list[int]:
    """Return, per flattened argument, the argument that it is part of; -1 for keywords'."""
    counts = [len(pytree.tree_leaves(arg)) for arg in node.args]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    return owners + [-1] * len(pytree.tree_leaves(dict(node.kwargs)))
