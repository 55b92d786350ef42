"""Adds the weight gradients of a compiled stage to its parameters', as the deferred computations of a W task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from raypipe.runtime.backward.deferred import Closure, accumulate, accumulate_product
from raypipe.runtime.compiled.layout import Gradient


def ready_closures(
    gradients: Sequence[Gradient], values: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Closure]:
    """Return one closure per gradient, whose values are there.

    Args:
        gradients: where each gradient is among ``values``.
        values: the outputs of a compiled piece.
        parameters: the stage's, in order; those of another weight version where the forward ran on one.
    """
    return [_closure(one, parameters[one.parameter], lambda: values) for one in gradients]


def later_closures(
    gradients: Sequence[Gradient], compute: Callable[[], Sequence[Tensor]], parameters: Sequence[Tensor]
) -> list[Closure]:
    """Return closures of which the first computes the values: ``compute`` is called once, when W runs."""
    if not gradients:
        return []
    held: list[Sequence[Tensor]] = []
    first = Closure(lambda: held.append(compute()), ())
    return [first, *(_closure(one, parameters[one.parameter], lambda: held[0]) for one in gradients)]


def _closure(one: Gradient, parameter: Tensor, values: Callable[[], Sequence[Tensor]]) -> Closure:
    def compute() -> None:
        found = values()
        if one.second is not None:
            accumulate_product(parameter, None, found[one.first], found[one.second], found[one.second])
        elif one.shared and parameter.grad is None:
            accumulate(parameter, found[one.first].clone())
        else:
            accumulate(parameter, found[one.first])

    return Closure(compute, (parameter,))
