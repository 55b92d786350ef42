"""Rewrites of a joint graph before it is cut: what hides that its parts run at different times is taken apart."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from raypipe.runtime.compiled.tracing.graphs import value
from raypipe.runtime.compiled.tracing.joint import JointGraph
from raypipe.runtime.compiled.tracing.lower_precision import FALLS_BACK

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default


def prepare(joint: JointGraph) -> None:
    """Make all rewrites, in place."""
    _drop_detached(joint.graph.graph)
    _lift_casts(joint)
    _split_convolutions(joint.graph.graph)
    joint.graph.graph.eliminate_dead_code()
    joint.graph.graph.lint()
    joint.graph.recompile()


def _drop_detached(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _lift_casts(joint: JointGraph) -> None:
    """Make casts of whole parameters inputs, so that the micro-batches of a step share them (``executor.casts``)."""
    graph = joint.graph.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    made: dict[tuple[int, torch.dtype], fx.Node] = {}
    last = placeholders[joint.given - 1]
    for number in range(len(joint.parameters)):
        for node in [user for user in placeholders[number].users if user.target is CAST]:
            dtype = node.args[1]
            if (number, dtype) not in made:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"primals_{joint.given + len(made) + 1}")
                last.meta = dict(node.meta)
                made[number, dtype] = last
                joint.casts.append((number, dtype))
            node.replace_all_uses_with(made[number, dtype])
            graph.erase_node(node)


def _split_convolutions(graph: fx.Graph) -> None:
    """Compute a convolution's gradients one by one: that of its weight may wait, whoever needs the others."""
    for node in list(graph.nodes):
        if node.target is not aten.convolution_backward.default:
            continue
        if FALLS_BACK not in node.meta:  # else its sum has to round as PyTorch's kernel does
            _sum_bias(graph, node)
        *args, mask = node.args
        if not (mask[0] and any(mask[1:])):
            continue
        values = node.meta["val"]
        with graph.inserting_after(node):
            weights = graph.call_function(node.target, (*args, [False, *mask[1:]]))
        weights.meta = {**node.meta, "val": (None, *values[1:])}
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] != 0:
                user.args = (weights, user.args[1])
        node.args = (*args, [True, False, False])
        node.meta = {**node.meta, "val": (values[0], None, None)}


def _sum_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Compute the gradient of a convolution's bias as the sum that it is, rather than with that of the weight."""
    arguments: tuple[Any, ...] = node.args
    *args, mask = arguments
    if not mask[2]:
        return
    gradient, values = args[0], node.meta["val"]
    with graph.inserting_before(node):
        dims = [0, *range(2, value(gradient).dim())]
        made = graph.call_function(aten.sum.dim_IntList, (gradient, dims))
    made.meta = {**node.meta, "val": values[2]}
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 2:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
    node.args = (*args, [*mask[:2], False])
    node.meta = {**node.meta, "val": (*values[:2], None)}
