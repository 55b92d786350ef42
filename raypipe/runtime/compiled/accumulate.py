"""Adds the weight gradients of a compiled stage to its parameters', as the deferred computations of a W task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raypipe.runtime.backward.deferred import Closure, accumulate
from raypipe.runtime.compiled.layout import Gradient

Values = Callable[[], Sequence[Tensor]]
"""Returns the outputs of a piece."""


class Accumulation:
    """Adds the weight gradients that a piece computes.

    Products, which cost as much as all else in W, have a closure each; all others are added by one call.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._products = [(one.parameter, one.first, one.second) for one in gradients if one.second is not None]
        self._others = tuple(one for one in gradients if one.second is None)

    def ready(self, values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Closure]:
        """Return closures that add the gradients, whose values are there.

        Args:
            values: the outputs of the piece.
            parameters: the stage's, in order; those of another weight version where the forward ran on one.
        """
        return self._closures(parameters, lambda: values)

    def later(self, compute: Values, parameters: Sequence[Tensor]) -> list[Closure]:
        """Return closures of which the first computes the values: ``compute`` is called once, when W runs."""
        if not self._products and not self._others:
            return []
        held: list[Sequence[Tensor]] = []
        first = Closure(lambda: held.append(compute()), ())
        return [first, *self._closures(parameters, lambda: held[0])]

    def _closures(self, parameters: Sequence[Tensor], values: Values) -> list[Closure]:
        closures = []
        for number, first, second in self._products:
            parameter = parameters[number]
            closures.append(Closure(partial(_add_product, parameter, values, first, second), (parameter,)))
        if self._others:
            of = tuple(parameters[one.parameter] for one in self._others)
            closures.append(Closure(lambda: _add(self._others, of, values()), of))
        return closures


def _add_product(parameter: Tensor, values: Values, first: int, second: int) -> None:
    """Add a product to a parameter's gradient: in one pass, without a temporary of its size, where dtypes allow."""
    made, total = values(), parameter.grad
    a, b = made[first], made[second]
    if total is not None and total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        accumulate(parameter, a.mm(b.to(a.dtype)))


def _add(gradients: Sequence[Gradient], parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add gradients that are there to their parameters'."""
    sums, added = [], []
    for one, parameter in zip(gradients, parameters, strict=True):
        value, total = values[one.first], parameter.grad
        if total is None:
            accumulate(parameter, value.clone() if one.shared else value)
        else:
            sums.append(total)
            added.append(value)
    if sums:
        torch._foreach_add_(sums, added)
