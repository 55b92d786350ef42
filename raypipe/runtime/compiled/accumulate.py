"""Adds the weight gradients of a compiled stage to its parameters', as the deferred computations of a W task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypipe.runtime.backward.deferred import Closure, accumulate, accumulate_product
from raypipe.runtime.compiled.layout import Gradient


def ready_closures(
    gradients: Sequence[Gradient], values: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Closure]:
    """Return closures that add the gradients, whose values are there.

    Products, which cost as much as all else in W, have one each; all others are added by one call.

    Args:
        gradients: where each gradient is among ``values``.
        values: the outputs of a compiled piece.
        parameters: the stage's, in order; those of another weight version where the forward ran on one.
    """
    return _closures(gradients, parameters, lambda: values)


def later_closures(
    gradients: Sequence[Gradient], compute: Callable[[], Sequence[Tensor]], parameters: Sequence[Tensor]
) -> list[Closure]:
    """Return closures of which the first computes the values: ``compute`` is called once, when W runs."""
    if not gradients:
        return []
    held: list[Sequence[Tensor]] = []
    first = Closure(lambda: held.append(compute()), ())
    return [first, *_closures(gradients, parameters, lambda: held[0])]


def _closures(
    gradients: Sequence[Gradient], parameters: Sequence[Tensor], values: Callable[[], Sequence[Tensor]]
) -> list[Closure]:
    ready = [one for one in gradients if one.second is None]
    closures = [_product(one, parameters[one.parameter], values) for one in gradients if one.second is not None]
    if ready:
        of = tuple(parameters[one.parameter] for one in ready)
        closures.append(Closure(lambda: _add(ready, of, values()), of))
    return closures


def _product(one: Gradient, parameter: Tensor, values: Callable[[], Sequence[Tensor]]) -> Closure:
    def compute() -> None:
        found = values()
        assert one.second is not None
        accumulate_product(parameter, None, found[one.first], found[one.second], found[one.second])

    return Closure(compute, (parameter,))


def _add(gradients: Sequence[Gradient], parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add gradients that are there to their parameters'."""
    sums, added = [], []
    for one, parameter in zip(gradients, parameters, strict=True):
        value = values[one.first]
        if parameter.grad is None:
            accumulate(parameter, value.clone() if one.shared else value)
        else:
            sums.append(parameter.grad)
            added.append(value)
    if sums:
        torch._foreach_add_(sums, added)
