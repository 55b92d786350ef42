"""Split backward: input gradients now (B), weight gradients later (W).

A layer that can wait is run through an autograd function whose backward returns only the gradient of its input and
leaves a closure for the weights in a queue. So B is autograd's ordinary backward, and W runs the closures, in any
order, without walking the autograd graph a second time (PyTorch's own way, which costs 6-84 % and runs custom
functions twice). Parameters of other layers get their gradient in B, as in a joint backward; norms on purpose: one
kernel makes both of a norm's gradients, so to split it costs more than its weight gradient is worth.

Source: zero-bubble pipeline parallelism (the split) and out-of-order backprop section 3 (why dW may wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.partition.tensor.layers import Row, Vocabulary, plain_product

Closure = Callable[[], None]


class WeightQueue:
    """Where the backward of deferred layers leaves its weight-gradient closures; one per stage."""

    def __init__(self) -> None:
        self.current: list[Closure] = []

    @contextmanager
    def collect(self, into: list[Closure]) -> Iterator[None]:
        """Closures made inside the block land in ``into``."""
        before, self.current = self.current, into
        try:
            yield
        finally:
            self.current = before


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad.add_(gradient)


def _linear_weight_grad(weight: Tensor, bias: Tensor | None, x: Tensor, gy: Tensor) -> None:
    gy2, x2 = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
    if weight.requires_grad:
        if weight.grad is not None and weight.grad.dtype == gy2.dtype == x2.dtype:
            weight.grad.addmm_(gy2.t(), x2)  # one pass, no temporary of the weight's size
        else:
            _accumulate(weight, gy2.t().mm(x2.to(gy2.dtype)))
    if bias is not None and bias.requires_grad:
        _accumulate(bias, gy2.sum(0))


class _DeferredLinear(torch.autograd.Function):
    """``F.linear`` whose weight gradient waits in a queue."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue) -> Tensor:
        y = F.linear(x, weight, bias)
        # Under autocast the product ran in y's dtype; keep x in it, as autograd would. Saved, not just referenced:
        # autograd then notices when something overwrites them in place.
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.x_dtype = x.dtype
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gy,) = grads
        weight, bias = ctx.weight, ctx.bias
        x = ctx.saved_tensors[0].detach()
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            ctx.queue.current.append(lambda: _linear_weight_grad(weight, bias, x, gy))
        gx = None
        if ctx.needs_input_grad[0]:
            gx = gy.matmul(weight.to(gy.dtype)).to(ctx.x_dtype)
        return gx, None, None, None


class _DeferredEmbedding(torch.autograd.Function):
    """``F.embedding`` whose weight gradient waits in a queue; token ids have no gradient of their own."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gy,) = grads
        (ids,), weight = ctx.saved_tensors, ctx.weight

        def weight_grad() -> None:
            flat = gy.reshape(-1, gy.shape[-1]).to(weight.dtype)
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, ids.reshape(-1), flat)

        if weight.requires_grad:
            ctx.queue.current.append(weight_grad)
        return None, None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _defer_linear(module: nn.Linear, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    return lambda x: _apply(_DeferredLinear, x, module.weight, module.bias, queue)


def _defer_embedding(module: nn.Embedding, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    return lambda ids: _apply(_DeferredEmbedding, ids, module.weight, queue)


def _defer_product(module: nn.Module, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    """Of a divided layer: what it computes between the exchanges of its group."""
    if isinstance(module, Vocabulary):
        return _defer_embedding(module, queue)
    assert isinstance(module, nn.Linear)
    bias = None if isinstance(module, Row) else module.bias
    return lambda x: _apply(_DeferredLinear, x, module.weight, bias, queue)


def _deferrable(module: nn.Module) -> Callable[[Any, WeightQueue], Callable[[Tensor], Tensor]] | None:
    if type(module) is nn.Linear:
        return _defer_linear
    if type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None and not module.sparse:
        return _defer_embedding
    return None


def defer_weight_gradients(root: nn.Module, queue: WeightQueue) -> list[str]:
    """Make every layer of ``root`` that can wait leave its weight gradient in ``queue``.

    Returns the names of parameters that cannot wait: their gradients are computed in B.
    """
    deferred: set[nn.Parameter] = set()
    for module in root.modules():
        if plain_product(module) is not None:
            module.product = _defer_product(module, queue)  # type: ignore[assignment]
            deferred.update(p for p in module.parameters(recurse=False) if p.dim() > 1 or not isinstance(module, Row))
            continue
        wrap = _deferrable(module)
        if wrap is not None:
            module.forward = wrap(module, queue)
            deferred.update(module.parameters(recurse=False))
    return [name for name, p in root.named_parameters() if p not in deferred]
