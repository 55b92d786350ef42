"""Any operation with deferred weight gradients, where ``deferred`` has no function of its own for it.

The operation runs in a small autograd graph of its own. B asks that graph for the gradients of the activations, and W
for those of the weights; for a product, either is one product. A weight may also be the result of operations on
parameters alone (a *weight expression*, ``capture/weight_gradients.py``): then W goes on to the parameters.

For recurrent layers both B and W walk the steps of the sequence; in exchange nothing of a weight's gradient stays in B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from raypipe.runtime.backward.deferred import Closure, WeightQueue, accumulate

GROUPED = "transformers.grouped_mm_fallback"
"""transformers' grouped product; its own backward computes both gradients in one operation."""


class _Work(NamedTuple):
    """A call with its weights; autograd must not see these, so they are no arguments of the autograd function."""

    function: Callable[..., Any]
    structure: Any
    leaves: tuple[Any, ...]
    weights: dict[int, Tensor]
    """By position among the leaves."""
    activations: tuple[int, ...]
    parameters: tuple[Tensor, ...]
    queue: WeightQueue


def deferred_operation(
    queue: WeightQueue, function: Callable[..., Any], places: Sequence[int], parameters: Sequence[Tensor],
    args: Sequence[Any], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Compute ``function(*args, **kwargs)``; the gradients of its weights are deferred to ``queue``.

    Args:
        queue: of the stage.
        function: returns a tensor or several.
        places: positions of the weights among the flattened arguments.
        parameters: the parameters that the weights are, or are made of.
        args, kwargs: of the call.
    """
    leaves, structure = pytree.tree_flatten((list(args), kwargs))
    weights = {i: leaves[i] for i in places if isinstance(leaves[i], Tensor) and leaves[i].requires_grad}
    trained = tuple(p for p in parameters if p.requires_grad)
    if not weights or not torch.is_grad_enabled() or not all(map(queue.defers, trained)):
        return function(*args, **kwargs)
    if GROUPED in str(function):
        x, weight, offs = leaves[:3]
        return _DeferredGrouped.apply(x, trained[0], offs, _Box(weight, trained, queue))  # type: ignore[no-untyped-call]
    weights = {i: _cast(queue, weight) for i, weight in weights.items()} if _is_product(function) else weights
    activations = tuple(
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in weights and leaf.requires_grad
    )
    work = _Work(function, structure, tuple(leaves), weights, activations, trained, queue)
    # A parameter is an argument without a gradient, so that the result requires one even if no activation does.
    results = _Deferred.apply(work, trained[0], *(leaves[i] for i in activations))  # type: ignore[no-untyped-call]
    return results[0] if len(results) == 1 else results


def _is_product(function: Callable[..., Any]) -> bool:
    return "lstm" not in str(function) and "gru" not in str(function) and "rnn" not in str(function)


def _cast(queue: WeightQueue, weight: Tensor) -> Tensor:
    """Cast a weight as autocast would; for a parameter the copy is the step's, for an expression part of its graph."""
    if weight.is_leaf:
        return weight
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype == torch.float32:
        return weight.to(torch.get_autocast_dtype(kind))
    return weight


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, anchor: Tensor, *activations: Tensor) -> tuple[Tensor, ...]:
        given = list(work.leaves)
        inputs = [x.detach().requires_grad_() for x in activations]
        product = _is_product(work.function)
        used = {}
        for i, w in work.weights.items():
            used[i] = (work.queue.cast(w) if product and w.is_leaf else w).detach().requires_grad_()
        for i, x in (*zip(work.activations, inputs, strict=True), *used.items()):
            given[i] = x
        args, kwargs = pytree.tree_unflatten(given, work.structure)
        with torch.enable_grad():
            made = work.function(*args, **kwargs)
        results = [made] if isinstance(made, Tensor) else list(made)
        ctx.work, ctx.inputs, ctx.used, ctx.results = work, inputs, used, results
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        work: _Work = ctx.work
        pairs = [(y, g) for y, g in zip(ctx.results, grads, strict=True) if g is not None and y.requires_grad]
        inputs, used = ctx.inputs, ctx.used
        ctx.results = ctx.inputs = ctx.used = ctx.work = None
        if not pairs:
            return None, None, *(None for _ in inputs)
        ends, given = [y for y, _ in pairs], [g for _, g in pairs]
        back: Sequence[Tensor | None] = ()
        if inputs:
            back = torch.autograd.grad(ends, inputs, given, retain_graph=True, allow_unused=True)
        leaves = list(used.values())

        def weight_grads() -> None:
            found = torch.autograd.grad(ends, leaves, given, allow_unused=True)
            for weight, gradient in zip(work.weights.values(), found, strict=True):
                if gradient is not None:
                    add_gradient(weight, gradient, work.parameters)

        work.queue.current.append(Closure(weight_grads, work.parameters))
        return None, None, *back


def add_gradient(weight: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add to a parameter's gradient, or carry a weight expression's gradient back to its ``parameters``."""
    if weight.is_leaf:
        accumulate(weight, gradient)
        return
    # Retained, because several products may read one expression, each with a closure of its own.
    found = torch.autograd.grad(
        [weight], parameters, [gradient.to(weight.dtype)], retain_graph=True, allow_unused=True
    )  # fmt: skip
    for parameter, part in zip(parameters, found, strict=True):
        if part is not None:
            accumulate(parameter, part.contiguous())


class _Box(NamedTuple):
    """A weight that autograd must not see as an argument."""

    weight: Tensor
    parameters: tuple[Tensor, ...]
    queue: WeightQueue


class _DeferredGrouped(torch.autograd.Function):
    """``y[rows of group g] = x[rows of group g] @ weight[g]`` with a deferred gradient of the weight.

    x ``[rows, inside]``, sorted by group; weight ``[groups, inside, outside]``; ``offs [groups]``, where each ends.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, offs: Tensor, box: _Box) -> Tensor:
        ctx.save_for_backward(x, box.weight.detach())
        ctx.box, ctx.rows = box, _rows(offs)
        y = x.new_zeros(len(x), box.weight.shape[2])
        for group, rows in enumerate(ctx.rows):
            torch.mm(x[rows], box.weight.detach()[group], out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gy,) = grads
        x, used = ctx.saved_tensors
        box, groups = ctx.box, ctx.rows

        def weight_grad() -> None:
            gw = torch.zeros_like(used)
            for group, rows in enumerate(groups):
                torch.mm(x[rows].t(), gy[rows], out=gw[group])
            add_gradient(box.weight, gw, box.parameters)

        box.queue.current.append(Closure(weight_grad, box.parameters))
        gx = None
        if ctx.needs_input_grad[0]:
            gx = torch.zeros_like(x)
            for group, rows in enumerate(groups):
                torch.mm(gy[rows], used[group].t(), out=gx[rows])
        return gx, None, None, None


def _rows(offs: Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
