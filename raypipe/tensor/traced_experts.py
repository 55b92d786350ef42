"""Divided experts as two operators of a traced graph, so that all else of a stage can be compiled.

How many rows a copy gets follows from values, and no graph can hold that. But experts map tokens to as many tokens: in
a graph they are one operator with shapes that are known, and their backward is another. What runs is the module's own
code, with its exchanges, as in an eager stage. It leaves the graph of autograd on a scalar that the first operator
returns beside its result and the second takes; the scalar lives as long as the micro-batch needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from raypipe.compat import torch_private


class HeldExperts(nn.Module):
    """Divided experts that programs call by their path in the model."""

    path: str = ""
    loads: Tensor | None = None
    """int64 ``[experts]``, over all copies: how many of this copy's tokens went to each since ``take_loads``."""

    def add_loads(self, loads: Tensor | None) -> None:
        """Count further tokens; None: none."""
        if loads is not None:
            self.loads = loads if self.loads is None else self.loads + loads

    def take_loads(self) -> Tensor | None:
        """Return ``loads``, and begin to count anew."""
        result, self.loads = self.loads, None
        return result


_tracing: ContextVar[bool] = ContextVar("tracing", default=False)
_held: WeakValueDictionary[str, HeldExperts] = WeakValueDictionary()


def hold(path: str, module: HeldExperts) -> None:
    """Make a module of this process known under its path, by which programs call it.

    Of several stage replicas that hold the same layer, any may compute: parameters are arguments.
    """
    module.path, _held[path] = path, module


@contextmanager
def tracing() -> Iterator[None]:
    """Inside the block, calls of divided experts are operators of the graph that is traced."""
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_traced() -> bool:
    """Return whether calls of divided experts are to be operators."""
    return _tracing.get()


def traced(module: HeldExperts, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Put a call of divided experts into the graph that is traced, with the module's parameters as they are now."""
    kind = tokens.device.type
    cast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if cast else None
    parameters = list(module.parameters())
    result: Tensor = _Experts.apply(module.path, dtype, torch.is_grad_enabled(), tokens, numbers, weights, *parameters)  # type: ignore[no-untyped-call]
    return result


class _Experts(torch.autograd.Function):
    """Both operators, for the autograd of the trace."""

    @staticmethod
    def forward(ctx: Any, path: str, dtype: torch.dtype | None, keeps: bool, *given: Tensor) -> Tensor:
        tokens, numbers, weights, *parameters = given
        made, state = torch.ops.raypipe.experts(tokens, numbers, weights, parameters, path, dtype, keeps)
        ctx.save_for_backward(state, tokens, weights, *parameters)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        state, tokens, weights, *parameters = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[n] for n in (3, 5, *range(6, 6 + len(parameters)))]
        found = iter(torch.ops.raypipe.experts_backward(state, gradient, [tokens, weights, *parameters], wanted))
        first, second, *rest = [next(found) if one else None for one in wanted]
        return None, None, None, first, None, second, *rest


_library = torch.library.Library("raypipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "experts(Tensor tokens, Tensor numbers, Tensor weights, Tensor[] parameters, str path, ScalarType? dtype, "
    "bool keeps) -> (Tensor, Tensor)"
)
_library.define(  # type: ignore[no-untyped-call]
    "experts_backward(Tensor state, Tensor gradient, Tensor[] leaves, bool[] wanted) -> Tensor[]"
)


def _experts(
    tokens: Tensor,
    numbers: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    path: str,
    dtype: torch.dtype | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    if _is_shape(tokens):
        with torch_private._AutoDispatchBelowAutograd():
            return torch.ops.raypipe.experts(tokens, numbers, weights, parameters, path, dtype, keeps)  # type: ignore[no-any-return]
    held, state = _held[path], torch.zeros((), dtype=torch.int64)
    cast = torch.autocast(tokens.device.type, dtype, enabled=dtype is not None, cache_enabled=False)
    with torch.set_grad_enabled(keeps), cast:
        if keeps:  # programs write over what they no longer read themselves
            tokens, numbers, weights = tokens.detach().clone(), numbers.clone(), weights.detach().clone()
        leaves = [x.detach().requires_grad_(keeps) for x in (tokens, weights, *parameters)]
        # A module of its own around these parameters, since others may call the one that is held at the same time.
        module = copy.copy(held)
        module.__dict__.pop("product", None)  # which defers weight gradients of the held one's parameters
        names = [name for name, parameter in held._parameters.items() if parameter is not None]
        module._parameters = held._parameters | dict(zip(names, leaves[2:], strict=True))  # type: ignore[arg-type]
        module.loads = None
        made = module(leaves[0], numbers, leaves[1])
    if keeps:
        state.__dict__["ran"] = made, leaves
        held.add_loads(module.loads)
    return made.detach().clone() if keeps else made, state


def _backward(state: Tensor, gradient: Tensor, leaves: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    if _is_shape(gradient):
        with torch_private._AutoDispatchBelowAutograd():
            return torch.ops.raypipe.experts_backward(state, gradient, leaves, wanted)  # type: ignore[no-any-return]
    made, own = state.__dict__.pop("ran")
    chosen = [leaf for leaf, one in zip(own, wanted, strict=True) if one]
    with torch.enable_grad():
        found = torch.autograd.grad(made, chosen, gradient, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(chosen, found, strict=True)]


def _is_shape(x: Tensor) -> bool:
    """Return whether a tensor is of a graph that is made: it has no values."""
    return _tracing.get() or type(x) is not Tensor


_library.impl("experts", _experts, "Autograd")  # type: ignore[no-untyped-call]
_library.impl("experts_backward", _backward, "Autograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "raypipe::experts",
    lambda tokens, *_: (
        torch.empty_like(tokens, memory_format=torch.contiguous_format),
        torch.empty((), dtype=torch.int64),
    ),
    lib=_library,
)
torch.library.register_fake(
    "raypipe::experts_backward",
    lambda _state, _gradient, leaves, wanted: [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, one in zip(leaves, wanted, strict=True) if one
    ],
    lib=_library,
)
