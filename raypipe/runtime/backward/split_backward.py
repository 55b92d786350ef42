"""Split backward: compute input gradients in B and weight gradients later in W.

A layer whose weight gradient can be deferred runs through an autograd function whose backward returns only the
gradient of its input and appends a closure for the weights to a queue. B is then autograd's ordinary backward, and W
runs the closures, in any order. (PyTorch's pipelining walks the autograd graph a second time instead, which costs
6-84 % and runs custom functions twice.) All other parameters get their gradient in B, as in a joint backward. Norm
layers are among them on purpose: one kernel computes both of a norm's gradients, so splitting it would cost more than
its weight gradient.

In a captured graph, operations are deferred in the same way: ``linear``, ``addmm`` (transformers' Conv1D) and
``embedding``, where weight and bias are themselves parameters; convolutions, other products, and weights that are made
of parameters, by ``deferred.deferred_operation``.

Source: zero-bubble pipeline parallelism (the split) and out-of-order backprop section 3 (why dW may be deferred).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from raypipe.compat.torch_private import _pytree
from raypipe.graph.operation_costs import GATHERS, PLACES, short_name
from raypipe.runtime.backward.deferred import (
    Closure,
    WeightQueue,
    deferred_embedding,
    deferred_linear,
    deferred_operation,
)
from raypipe.tensor.divide import RowParallel, VocabularyParallel, plain_product
from raypipe.tensor.experts import ExpertsParallel

__all__ = ["Closure", "WeightQueue", "defer_weight_gradients"]
QUEUE = "_weight_queue"
"""Attribute of a graph module that holds the queue of its deferred operations."""
aten = torch.ops.aten
PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "grouped_mm", "_grouped_mm"}
"""Names of functions that multiply an input with a weight, in this order; the last is what torch's grouped_mm calls."""


def defer_weight_gradients(root: nn.Module, queue: WeightQueue) -> list[str]:
    """Defer weight gradients to ``queue`` in every layer of ``root``, and operation of its graphs, that supports it.

    Returns the names of the other parameters, whose gradients (or a part of them) are computed in B.
    """
    deferred: set[nn.Parameter] = set()
    for module in root.modules():
        if plain_product(module) is not None:
            module.product = _defer_product(module, queue)  # type: ignore[assignment]
            deferred.update(
                p for p in module.parameters(recurse=False) if p.dim() > 1 or not isinstance(module, RowParallel)
            )
            continue
        if isinstance(module, ExpertsParallel):
            module.product = partial(_deferred_products, module.product, DeferredProducts(module, queue))  # type: ignore[method-assign]
            deferred.update(p for p in module.parameters(recurse=False) if p.dim() == 3)
            continue
        wrap = _wrapper(module)
        if wrap is not None:
            module.forward = wrap(module, queue)
            deferred.update(module.parameters(recurse=False))
        elif isinstance(module, fx.GraphModule):
            deferred |= _defer_in_graph(module, queue)
    return [name for name, p in root.named_parameters() if p not in deferred]


def _defer_linear(module: nn.Linear, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    return lambda x: deferred_linear(x, module.weight, module.bias, queue)


def _defer_embedding(module: nn.Embedding, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    return lambda ids: deferred_embedding(ids, module.weight, module.padding_idx, queue)


def _defer_product(module: nn.Module, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    """Defer the matrix product of a divided layer, which it computes between the collectives of its group."""
    if isinstance(module, VocabularyParallel):
        return _defer_embedding(module, queue)
    assert isinstance(module, nn.Linear)
    row = isinstance(module, RowParallel)
    return lambda x: deferred_linear(x, module.weight, None if row else module.bias, queue)


def _deferred_products(product: Callable[..., Tensor], products: DeferredProducts, *args: Tensor) -> Tensor:
    """Compute the forward of divided experts, whose weights the code of their class reads by itself."""
    with products:
        return product(*args)


class DeferredProducts(TorchFunctionMode):
    """Inside the block, defers the products of an input with a module's matrices, or with a part or a view of one.

    For modules whose code is not captured; others' products are found in their graphs (``_defer_in_graph``).
    """

    def __init__(self, module: nn.Module, queue: WeightQueue) -> None:
        super().__init__()
        self._own, self._queue = {id(p) for p in module.parameters(recurse=False) if p.dim() == 3}, queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in PRODUCTS and (root := self._root(args[1])) is not None:
            return deferred_operation(self._queue, func, (1,), (root,), args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _root(self, weight: Tensor) -> Tensor | None:
        """Return the parameter of which a weight is a part or a view; None if it is anything else."""
        result: Tensor | None = weight
        node = weight.grad_fn
        for _ in range(VIEWS):
            if node is None:
                break
            result = getattr(node, "variable", None)
            node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        return result if id(result) in self._own else None


VIEWS = 4
"""Nodes of the graph that at most lie behind a part of a parameter: select, transpose, and the parameter's own."""


def _wrapper(module: nn.Module) -> Callable[[Any, WeightQueue], Callable[[Tensor], Tensor]] | None:
    if type(module) is nn.Linear:
        return _defer_linear
    if type(module) is nn.Embedding and module.max_norm is None and not module.sparse and not module.scale_grad_by_freq:
        return _defer_embedding
    return None


def _linear(queue: WeightQueue, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return deferred_linear(x, weight, bias, queue)


def _product(queue: WeightQueue, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return deferred_linear(x, weight, bias, queue, flipped=True)


def _embedding(queue: WeightQueue, weight: Tensor, ids: Tensor, padding: int = -1) -> Tensor:
    return deferred_embedding(ids, weight, padding if padding >= 0 else None, queue)


OPERATIONS: dict[Any, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    aten.linear.default: (_linear, (1, 2)),
    aten.addmm.default: (_product, (0, 2)),
    aten.embedding.default: (_embedding, (0,)),
}
"""Per operation, the function that runs it deferred, and the positions of arguments that must be parameters or None."""


NARROWED = {"linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d"}
"""Products whose operands autocast casts to its dtype, on CPUs and on GPUs."""


def _defer_in_graph(module: fx.GraphModule, queue: WeightQueue) -> set[nn.Parameter]:
    """Defer the operations of a graph that support it; return the parameters whose gradients are all deferred."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    read = {n: parameters[str(n.target)] for n in module.graph.nodes if n.op == "get_attr" and n.target in parameters}
    weights = find_weights(module.graph, read)
    setattr(module, QUEUE, queue)
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        queue_node = module.graph.create_node("get_attr", QUEUE)
    waiting: set[fx.Node] = set()
    for node, places in weights.places.items():
        waiting.add(node)
        function = _deferred(node, read)
        if function is not None:
            node.target, node.args = function, (queue_node, *node.args)
        else:
            roots = tuple(dict.fromkeys(r for place in places for r in weights.roots[weights.leaf(node, place)]))
            node.args = (queue_node, node.target, places, roots, node.args, dict(node.kwargs))  # type: ignore[assignment]
            node.target, node.kwargs = deferred_operation, {}
    module.recompile()
    joint = {read[n] for n in read if any(u not in waiting and u not in weights.roots for u in n.users)}
    return set(read.values()) - joint


def _deferred(node: fx.Node, read: dict[fx.Node, nn.Parameter]) -> Callable[..., Tensor] | None:
    """Return the function of its own that runs this operation deferred; None if ``deferred_operation`` has to."""
    if node.target not in OPERATIONS or node.kwargs:
        return None
    function, places = OPERATIONS[node.target]
    for i, arg in enumerate(node.args):
        if (i in places and arg is not None) != (isinstance(arg, fx.Node) and arg in read):
            return None
    if function is _embedding:  # scale_grad_by_freq and sparse are not supported
        return None if any(node.args[3:]) else function
    if function is _product and read[node.args[0]].dim() != 1:  # type: ignore[index]
        return None
    return function


# Find the operations of a stage's graph whose weight gradients can wait, and what their weights are made of.
#
# The rules are those of ``graph/operation_costs.py``, by which ``raypipe partition`` counts what stays in B; here
# they hold within one stage, where an expression counts only if nothing but deferred products reads it.


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
        result: fx.Node = _leaves(node)[place]
        return result


def weights_of_products(root: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that ``root`` reads in one place each, in a product that autocast makes narrower.

    Autocast casts these wherever they are read; others, those of norms and embeddings, it leaves as they are. It holds
    before and after ``defer_weight_gradients``.
    """
    found, times = set[nn.Parameter](), Counter[nn.Parameter]()
    left = [root]
    while left:
        module = left.pop()
        if isinstance(module, fx.GraphModule):
            parameters = dict(module.named_parameters(remove_duplicate=False))
            read = [n for n in module.graph.nodes if n.op == "get_attr" and n.target in parameters]
            times.update(parameters[str(n.target)] for n in read)
            found.update(parameters[str(n.target)] for n in read if _read_by_product(n))
            continue
        own = list(module.parameters(recurse=False))
        times.update(own)
        if type(module) is nn.Linear or plain_product(module) == "linear":
            found.update(own)
        left += module.children()
    return {p for p in found if times[p] == 1}


def _read_by_product(node: fx.Node) -> bool:
    (user,) = node.users if len(node.users) == 1 else (None,)
    if user is None or _leaves(user).count(node) != 1:
        return False
    return user.target in (_linear, _product) or (user.op == "call_function" and name_of(user) in NARROWED)


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
    result: dict[fx.Node, tuple[fx.Node, ...]] = {n: (n,) for n in read}
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        inputs = node.all_input_nodes
        whole = all(n in result or n.op == "get_attr" for n in inputs) and any(n in result for n in inputs)
        gathered = node.args and node.args[0] in result and name_of(node) in GATHERS
        if whole or gathered:
            result[node] = tuple(dict.fromkeys(root for n in inputs for root in result.get(n, ())))
    return result


def _places(node: fx.Node, roots: Collection[fx.Node]) -> tuple[int, ...]:
    """Return the positions of an operation's weights; () if it has none, or all its tensors are weights."""
    positions = PLACES.get(name_of(node)) if node.op == "call_function" else None
    if positions is None:
        return ()
    leaves = _leaves(node)
    owners = _owners(node)
    result = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf in roots and owners[i] in positions
    ]
    two_factors = name_of(node) in ("mm", "bmm", "matmul")
    return tuple(result[:1] if two_factors else result)


def name_of(node: fx.Node) -> str:
    """Return the short name of the operation that a node calls."""
    return short_name(str(node.target))


def _leaves(node: fx.Node) -> list[Any]:
    result: list[Any] = _pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    return result


def _owners(node: fx.Node) -> list[int]:
    """Return, per flattened argument, the argument that it is part of; -1 for keywords'."""
    counts = [len(_pytree.tree_leaves(arg)) for arg in node.args]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    return owners + [-1] * len(_pytree.tree_leaves(dict(node.kwargs)))
