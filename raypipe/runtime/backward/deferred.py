"""Operations with a deferred weight gradient: their backward returns only the gradient of their input.

The computation of the weight gradient is appended to a queue as a closure; see ``split_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from raypipe.compat.torch_private import _pytree
from raypipe.runtime.backward.waiting import WaitingOperands


class Closure(NamedTuple):
    """A deferred computation of weight gradients."""

    compute: Callable[[], None]
    parameters: tuple[Tensor, ...]
    """The parameters to whose gradients it adds."""


class WeightQueue:
    """Collects the weight-gradient closures of deferred layers; there is one queue per stage."""

    def __init__(self) -> None:
        self.current: list[Closure] = []
        self.whole = False
        """Whether the running backward is to compute weight gradients too, rather than leave them to a W task."""
        self.only: frozenset[Tensor] | None = None
        """The parameters whose gradients are deferred; None for all that can be."""
        self.waiting: WaitingOperands | None = None
        """Where somebody has use for it: what weight gradients wait for, or would."""
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def defers(self, parameter: Tensor) -> bool:
        """Return whether the gradient of a parameter is deferred in the graph that is being built."""
        return self.only is None or parameter in self.only

    def note(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Note what the gradient of a weight of ``y`` waits for; return ``y``."""
        if self.waiting is not None:
            self.waiting.note(weight, x, y)
        return y

    @contextmanager
    def collect(self, into: list[Closure]) -> Iterator[None]:
        """Append the closures made inside the block to ``into``."""
        before, self.current = self.current, into
        try:
            yield
        finally:
            self.current = before

    def cast(self, parameter: Tensor) -> Tensor:
        """Cast a parameter of a product as autocast would, if it is on: one copy for all micro-batches of a step.

        Autograd functions run without gradients, so autocast's own cache does not serve here (``executor.casts``).
        """
        kind = parameter.device.type
        if not torch.is_autocast_enabled(kind) or parameter.dtype != torch.float32:
            return parameter
        return self.copy_in(parameter, torch.get_autocast_dtype(kind))

    def copy_in(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a parameter in another dtype, the same one until the parameter changes."""
        known, version, copy = self._copies.get(id(parameter), (None, 0, parameter))
        if known is None or version != parameter._version or copy.dtype != dtype:
            copy = parameter.detach().to(dtype)
            self._copies[id(parameter)] = parameter, parameter._version, copy
        return copy

    def drop_copies(self) -> None:
        """Free the copies."""
        self._copies.clear()


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add ``gradient`` to a parameter's gradient, in the parameter's dtype, or that which its gradients have."""
    if parameter.grad is None:
        parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def accumulate_product(weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, gy: Tensor) -> None:
    """Add ``a @ b`` to the weight's gradient, and the sum of the rows of ``gy`` to the bias's."""
    if weight.requires_grad:
        if weight.grad is not None and weight.grad.dtype == a.dtype == b.dtype:
            weight.grad.addmm_(a, b)  # one pass, no temporary of the weight's size
        else:
            accumulate(weight, a.mm(b.to(a.dtype)))
    if bias is not None and bias.requires_grad:
        accumulate(bias, column_sums(gy))


def column_sums(x: Tensor) -> Tensor:
    """Return the sums over the rows of a matrix.

    On a GPU as a product: torch's sum of many rows first makes partial sums that take up to twice the bytes of ``x``.
    """
    return x.t().mv(x.new_ones(len(x))) if x.is_cuda else x.sum(0)


class _DeferredLinear(torch.autograd.Function):
    """``F.linear`` with deferred gradients of weight and bias; ``flipped``: the weight is ``[inside, outside]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, flipped: bool, queue: WeightQueue) -> Tensor:
        used = queue.cast(weight)
        y = F.linear(x, used.t() if flipped else used, None if bias is None else queue.cast(bias))
        # Under autocast the product ran in y's dtype, so x is saved in it, as autograd would. Tensors are saved through
        # ``save_for_backward`` so that autograd detects when they are overwritten in place.
        ctx.save_for_backward(x.to(y.dtype), used)
        ctx.x_dtype = x.dtype
        ctx.weight, ctx.bias, ctx.flipped, ctx.queue = weight, bias, flipped, queue
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gy,) = grads
        weight, bias, flipped = ctx.weight, ctx.bias, ctx.flipped
        x, used = ctx.saved_tensors[0].detach(), ctx.saved_tensors[1]

        def weight_grad() -> None:
            gy2, x2 = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
            a, b = (x2, gy2) if flipped else (gy2, x2)
            accumulate_product(weight, bias, a.t(), b, gy2)

        trained = tuple(p for p in (weight, bias) if p is not None and p.requires_grad)
        if trained:
            ctx.queue.current.append(Closure(weight_grad, trained))
        gx = None
        if ctx.needs_input_grad[0]:
            back = used.to(gy.dtype)
            gx = gy.matmul(back.t() if flipped else back).to(ctx.x_dtype)
        return gx, None, None, None, None


class _DeferredEmbedding(torch.autograd.Function):
    """``F.embedding`` with a deferred weight gradient; token ids have no gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.queue = weight, padding, queue
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gy,) = grads
        (ids,), weight, padding = ctx.saved_tensors, ctx.weight, ctx.padding

        def weight_grad() -> None:
            flat = gy.reshape(-1, gy.shape[-1]).to(weight.dtype)
            if padding is not None:  # the padding token's row gets no gradient
                flat = flat.masked_fill(ids.reshape(-1, 1) == padding, 0.0)
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, ids.reshape(-1), flat)

        if weight.requires_grad:
            ctx.queue.current.append(Closure(weight_grad, (weight,)))
        return None, None, None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def deferred_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue, flipped: bool = False
) -> Tensor:
    """Compute ``F.linear(x, weight, bias)``; the gradients of weight and bias are deferred to ``queue``.

    With ``flipped`` the weight is ``[inside, outside]``: the result is ``bias + x @ weight``.
    """
    if queue.defers(weight):
        y = _apply(_DeferredLinear, x, weight, bias, flipped, queue)
    else:
        y = F.linear(x, weight.t() if flipped else weight, bias)
    return queue.note(weight, x, y)


def deferred_embedding(ids: Tensor, weight: Tensor, padding: int | None, queue: WeightQueue) -> Tensor:
    """Compute ``F.embedding(ids, weight, padding)``; the weight's gradient is deferred to ``queue``."""
    if queue.defers(weight):
        y = _apply(_DeferredEmbedding, ids, weight, padding, queue)
    else:
        y = F.embedding(ids, weight, padding)
    return queue.note(weight, ids, y)


# Any other operation, where there is no function of its own above.
#
# The operation runs in a small autograd graph of its own. B asks that graph for the gradients of the activations, and W
# for those of the weights; for a product, either is one product. A weight may also be the result of operations on
# parameters alone (a *weight expression*, ``graph/operation_costs.py``): then W goes on to the parameters.
#
# For recurrent layers both B and W walk the steps of the sequence; in exchange nothing of a weight's gradient stays in
# B.

GROUPED = "transformers.grouped_mm_fallback"
"""transformers' grouped product; its own backward computes both gradients in one operation."""
CONVOLUTION = "aten.conv"
"""How the names of convolutions begin, whose first arguments are an input and a weight."""


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
    queue: WeightQueue,
    function: Callable[..., Any],
    places: Sequence[int],
    parameters: Sequence[Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Compute ``function(*args, **kwargs)``; the gradients of its weights are deferred to ``queue``.

    Args:
        queue: of the stage.
        function: returns a tensor or several.
        places: positions of the weights among the flattened arguments.
        parameters: the parameters that the weights are, or are made of.
        args, kwargs: of the call.
    """
    leaves, structure = _pytree.tree_flatten((list(args), kwargs))
    weights = {i: leaves[i] for i in places if isinstance(leaves[i], Tensor) and leaves[i].requires_grad}
    trained = tuple(p for p in parameters if p.requires_grad)
    noted = CONVOLUTION in str(function) and leaves[1].is_leaf
    if not weights or not torch.is_grad_enabled() or not all(map(queue.defers, trained)):
        made = function(*args, **kwargs)
        return queue.note(leaves[1], leaves[0], made) if noted else made
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
    if noted:
        queue.note(leaves[1], leaves[0], results[0])
    return results[0] if len(results) == 1 else results


def _is_product(function: Callable[..., Any]) -> bool:
    """Return whether autocast casts the weights of an operation; torch has no such rule for grouped products."""
    return not any(other in str(function) for other in ("lstm", "gru", "rnn", "grouped_mm"))


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
        args, kwargs = _pytree.tree_unflatten(given, work.structure)
        with torch.enable_grad():
            made = work.function(*args, **kwargs)
        results = [made] if isinstance(made, Tensor) else list(made)
        # Edges of the graph, so that results whose memory nobody else needs are freed.
        ctx.ends = [get_gradient_edge(y) if y.requires_grad else None for y in results]
        ctx.work, ctx.inputs, ctx.used = work, inputs, used
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        work: _Work = ctx.work
        pairs = [(end, g) for end, g in zip(ctx.ends, grads, strict=True) if g is not None and end is not None]
        inputs, used = ctx.inputs, ctx.used
        ctx.ends = ctx.inputs = ctx.used = ctx.work = None
        if not pairs:
            return None, None, *(None for _ in inputs)
        ends, given = [end for end, _ in pairs], [g for _, g in pairs]
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
    found = torch.autograd.grad([weight], parameters, [gradient.to(weight.dtype)], retain_graph=True, allow_unused=True)
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
