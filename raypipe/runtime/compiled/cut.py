"""Cut the joint graph of a stage into forward, input gradient and weight gradients.

The forward keeps what either backward reads, chosen by torch's min-cut: cheap values are computed again where that
keeps fewer bytes. The backward is then cut a second time. B holds what the gradients of the stage's inputs need, and
gradients of vectors (norms, biases), which are sums over values that B has at hand. W holds the rest. It runs later, so
what B hands to it stays in memory: views are made again in W, and a value crosses once however often W reads it.

Gradients that are products ``a @ b`` are left to whoever accumulates them, which adds the product to the gradient in
place, without a tensor of the weight's size in between.

Source: Qi et al. 2023 (zero bubble), section 2, for B and W; Chen et al. 2016 and torch's
``min_cut_rematerialization_partition`` for the first cut.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from raypipe.compat.torch_private import OpOverload, _functorch, _pytree, min_cut_rematerialization_partition
from raypipe.runtime.compiled.layout import Gradient, InputSlot, Interface
from raypipe.runtime.compiled.trace import CAST, JointGraph, is_view, value

aten = torch.ops.aten


@dataclass(kw_only=True)
class GraphPiece(Interface):
    """One graph of a stage."""

    graph: fx.GraphModule


@dataclass
class Cut:
    """The pieces of a stage."""

    forward: GraphPiece
    """Its outputs, then what it keeps."""
    forward_only: GraphPiece
    """The forward that keeps nothing."""
    backward: GraphPiece
    """Both gradients."""
    input_grad: GraphPiece
    weight_grad: GraphPiece
    kept_bytes: int
    """What a micro-batch keeps from F to B, parameters and inputs not counted."""
    handed_bytes: int
    """What it keeps from B to W, alike."""
    operand_bytes: int
    """What the joint backward has at its end to compute weight gradients from, beside what it was given."""
    in_input_grad: tuple[int, ...]
    """Numbers of the matrices whose gradients are computed in B."""


def cut(joint: JointGraph, budget: float = 1.0) -> Cut:
    """Cut a joint graph (``trace.prepare``) into pieces.

    Args:
        joint: the graph.
        budget: share of the bytes to keep from forward to backward, from 0 (inputs alone) to 1 (all but what is cheap
            to compute again).
    """
    forward, backward = _halves(joint, budget)
    primals = [node.name for node in joint.graph.graph.nodes if node.op == "placeholder"]
    primals = [name for name in primals if "tangents" not in name]
    tangents = [n.name for n in joint.graph.graph.nodes if n.op == "placeholder" and "tangents" in n.name]
    slots = {name: InputSlot("given", i) for i, name in enumerate(primals)}
    slots |= {name: InputSlot("tangent", i) for i, name in enumerate(tangents)}

    outputs, kept = _outputs_and_kept(joint, forward)
    slots |= {node.name: InputSlot("kept", i) for i, node in enumerate(kept)}
    first = _piece(forward, [*outputs, *kept], slots)
    cut = _Backward(joint, backward, slots)
    split, weights, handed, inside = cut.split()
    whole = cut.whole()
    made, back = results(whole.graph.graph), set(whole.back)
    return Cut(
        first,
        _piece(forward, outputs, slots),
        whole,
        split,
        weights,
        nbytes(kept),
        nbytes(node for node in handed if slots.get(node.name, InputSlot("kept", 0)).source != "given"),
        nbytes(x for i, x in enumerate(made) if x is not None and i not in back and base_of(x).op != "placeholder"),
        inside,
    )


def forward_alone(joint: JointGraph) -> GraphPiece:
    """Return the piece of a stage that is traced without a backward (``Example.training``)."""
    graph = joint.graph.graph
    given = [node.name for node in graph.nodes if node.op == "placeholder"]
    outputs = [node for node in results(graph) if node is not None]
    return _piece(joint.graph, outputs, {name: InputSlot("given", i) for i, name in enumerate(given)})


BISECTIONS = 6
"""How often torch's budget is halved to find the one that keeps as many bytes as are wanted."""


def _halves(joint: JointGraph, budget: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return forward and backward; the forward keeps at most this share of what it keeps by default.

    torch's own budget counts all parameters as inputs, also those that no backward reads (an embedding), so the same
    number keeps far less of one stage than of another. It is searched for the most bytes that are within the share.
    """
    parameters = len(joint.parameters) + len(joint.buffers)
    casts = range(joint.given, joint.given + len(joint.casts))

    def halves(share: float) -> tuple[int, tuple[fx.GraphModule, fx.GraphModule]]:
        with _functorch.config.patch(activation_memory_budget=share):
            made = min_cut_rematerialization_partition(
                joint.graph,
                None,
                num_fwd_outputs=joint.outputs,
                static_lifetime_input_indices=[*range(parameters), *casts],
            )
        return nbytes(_outputs_and_kept(joint, made[0])[1]), made

    size, result = halves(1.0)
    wanted = budget * size
    if size <= wanted:
        return result
    size, result = halves(0.0)
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        share = budget if (low, high) == (0.0, 1.0) else (low + high) / 2
        at, made = halves(share)
        if at > wanted:
            high = share
            continue
        low = share
        if at > size:
            size, result = at, made
    return result


def _outputs_and_kept(joint: JointGraph, forward: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what a forward computes for others, and what it keeps for the backward besides its inputs."""
    made = [node for node in results(forward.graph) if node is not None]
    return made[: joint.outputs], [node for node in made[joint.outputs :] if node.op != "placeholder"]


def _piece(module: fx.GraphModule, outputs: Sequence[fx.Node], slots: Mapping[str, InputSlot]) -> GraphPiece:
    """Return the part of a module that computes ``outputs`` from whatever has a slot."""
    needed = ancestors(outputs)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder" and node in needed]
    return GraphPiece(graph=extract(module, inputs, outputs), slots=tuple(slots[node.name] for node in inputs))


class _Backward:
    """The joint backward graph of a stage, and its parts."""

    def __init__(self, joint: JointGraph, module: fx.GraphModule, slots: Mapping[str, InputSlot]) -> None:
        self.joint, self.module, self.slots = joint, module, slots
        result = results(module.graph)
        self.weights = [(number, node) for number, node in zip(joint.trained, result, strict=False) if node is not None]
        self.back = result[len(joint.trained) :]

    def whole(self) -> GraphPiece:
        """Return the joint backward."""
        outputs = _Outputs()
        back = tuple(None if node is None else outputs.add(node) for node in self.back)
        gradients = self._gradients(outputs, self.weights)
        piece = _piece(self.module, outputs.nodes, self.slots)
        piece.gradients, piece.back = gradients, back
        return piece

    def split(self) -> tuple[GraphPiece, GraphPiece, list[fx.Node], tuple[int, ...]]:
        """Return B, W, what W reads, and the numbers of the matrices whose gradients are in B."""
        inside = self._in_input_grad()
        early = [(number, node) for number, node in self.weights if node in inside]
        late = [(number, node) for number, node in self.weights if node not in inside]

        ends = _Outputs()
        gradients = self._gradients(ends, late)
        boundary = self._boundary(ends.nodes, inside)
        handed = [node for node in boundary if node.op != "placeholder"]
        slots = {**self.slots, **{node.name: InputSlot("handed", i) for i, node in enumerate(handed)}}
        weight_grad = GraphPiece(
            graph=extract(self.module, boundary, ends.nodes),
            slots=tuple(slots[node.name] for node in boundary),
            gradients=gradients,
        )

        outputs = _Outputs()
        back = tuple(None if node is None else outputs.add(node) for node in self.back)
        early_gradients = self._gradients(outputs, early, products=False)
        hands = len(outputs.nodes)
        for node in handed:
            outputs.append(node)
        input_grad = _piece(self.module, outputs.nodes, self.slots)
        input_grad.gradients, input_grad.back, input_grad.hands = early_gradients, back, hands
        matrices = tuple(number for number, node in early if value(node).dim() > 1)
        return input_grad, weight_grad, boundary, matrices

    def _in_input_grad(self) -> set[fx.Node]:
        """Return the nodes of B."""
        ends = [node for node in self.back if node is not None]
        if ends:
            inside = ancestors(ends)
        else:  # the first stage has no input gradient; its B is what several weight gradients share
            counts: dict[fx.Node, int] = {}
            for _, node in self.weights:
                for ancestor in ancestors([node]):
                    counts[ancestor] = counts.get(ancestor, 0) + 1
            inside = {node for node, count in counts.items() if count > 1}
        inside = tuples_with_items(inside)
        for _, node in self.weights:
            more = ancestors([node], inside) - inside
            if value(node).dim() <= 1 and not any(map(is_product, more)):
                inside |= more
        return tuples_with_items(inside)

    @staticmethod
    def _boundary(ends: Iterable[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
        """Return the nodes that W reads: placeholders, and results of B other than views of them."""
        result: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" or (node in inside and not is_view(node) and node.op != "get_attr"):
                result[node] = None
            else:
                todo += node.all_input_nodes
        return list(result)

    @staticmethod
    def _gradients(
        outputs: _Outputs, weights: Sequence[tuple[int, fx.Node]], products: bool = True
    ) -> tuple[Gradient, ...]:
        """Add weight gradients to the outputs of a piece, from the last parameter to the first."""
        bases = [base_of(node) for _, node in weights]
        result = []
        for number, node in reversed(weights):
            factors = _factors(node) if products else None
            if factors is not None:
                result.append(Gradient(number, outputs.add(factors[0]), outputs.add(factors[1])))
                continue
            base = base_of(node)
            shared = base.op == "placeholder" or bases.count(base) > 1
            result.append(Gradient(number, outputs.add(node), shared=shared))
        return tuple(result)


class _Outputs:
    """The outputs of a piece, each once."""

    def __init__(self) -> None:
        self.nodes: list[fx.Node] = []

    def add(self, node: fx.Node) -> int:
        """Return the position of a node, which is added unless it is there."""
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)

    def append(self, node: fx.Node) -> None:
        """Add a node at the end, even if it is there already."""
        self.nodes.append(node)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the factors of a gradient that is a product of two matrices, perhaps transposed and cast.

    Transposed factors may be new nodes of the graph.
    """
    flipped = False
    while node.target is CAST or _transposes(node):
        flipped = flipped != (node.target is not CAST)
        node = node.all_input_nodes[0]
    if node.target is not aten.mm.default:
        return None
    a, b = _nodes(node.args)
    return (a, b) if not flipped else (_transposed(b), _transposed(a))


def _nodes(arguments: Sequence[Any]) -> list[fx.Node]:
    return [argument for argument in arguments if isinstance(argument, fx.Node)]


def _transposes(node: fx.Node) -> bool:
    """Return whether a node swaps the two dimensions of a matrix."""
    if node.target is aten.t.default:
        return True
    if node.target not in (aten.permute.default, aten.transpose.int) or value(node).dim() != 2:
        return False
    dims = [dim % 2 for dim in _pytree.tree_leaves(node.args[1:])]
    return dims == [1, 0] or (node.target is aten.transpose.int and dims[0] != dims[1])


def _transposed(node: fx.Node) -> fx.Node:
    """Return the node that is a matrix transposed."""
    if _transposes(node):
        return node.all_input_nodes[0]
    for user in node.users:
        if _transposes(user):
            return user
    with node.graph.inserting_after(node):
        made = node.graph.call_function(aten.permute.default, (node, [1, 0]))
    made.meta = {**node.meta, "val": value(node).t()}
    return made


# Collectives over tensor ranks, which every rank starts in the same order, although each may compile for itself.

COLLECTIVES = tuple(
    getattr(torch.ops.raypipe, name).default
    for name in (
        "reduce_from_group",
        "gather_from_group",
        "gather_sequence",
        "scatter_sequence",
        "cross_entropy_over_group",
    )
)


def order_collectives(piece: GraphPiece) -> None:
    """Make each collective of a piece read the result of the one before, unless it depends on that already."""
    names: list[str] = []
    last: fx.Node | None = None
    for node in [node for node in piece.graph.graph.nodes if node.target in COLLECTIVES]:
        if last is not None and last not in ancestors([node]):
            result = last
            if isinstance(last.meta["val"], tuple):
                with last.graph.inserting_after(last):
                    result = last.graph.call_function(operator.getitem, (last, 0))
                result.meta = {"val": last.meta["val"][0]}
            node.kwargs = {**node.kwargs, "after": result}
        last = node
        names.append(f"{node.target} {tuple(node.all_input_nodes[0].meta['val'].shape)}")
    piece.collectives = tuple(names)
    piece.graph.recompile()


# What the cut needs of graphs.


def ancestors(ends: Iterable[fx.Node], stop: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes that ``ends`` are computed from, and ``ends``; nothing behind those in ``stop``."""
    result: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in result:
            result.add(node)
            if node not in stop:
                todo += node.all_input_nodes
    return result


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


def is_product(node: fx.Node) -> bool:
    """Return whether a node costs floating-point operations that torch counts: products, convolutions, attention."""
    return isinstance(node.target, OpOverload) and node.target._overloadpacket in flop_registry


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's result is."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def tuples_with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes with all results of those that have several."""
    items = {user for node in nodes for user in node.users if user.target is operator.getitem}
    return nodes | items


def nbytes(nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the nodes' tensors; views of one tensor count once."""
    bases: Mapping[fx.Node, fx.Node] = {base_of(node): node for node in nodes}
    return sum(value(base).numel() * value(base).element_size() for base in bases)
