"""Figures that a loss function returns beside its loss, such as how often DPO's model prefers the chosen text.

A captured model has one output, so loss and figures are one tensor: the loss first in its last dimension. The output's
name holds theirs, and so it stays with a graph that is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.own_loss import LOSS

BETWEEN = ","
WHERE = "model.loss"


def loss_and_figures(made: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the parts of what a loss function has returned: the loss, or the loss and a dict of figures of its shape.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(made, Tensor):
        return made, {}
    fix = "return the loss, or the loss and a dict of tensors of its shape, as in (loss, {'accuracy': hits})"
    if not (
        isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Tensor) and isinstance(made[1], Mapping)
    ):
        raise SpecError(WHERE, f"the function returns {_kind(made)}", fix)
    loss, figures = made
    for name, figure in figures.items():
        if not isinstance(figure, Tensor) or figure.shape != loss.shape:
            shape = list(figure.shape) if isinstance(figure, Tensor) else _kind(figure)
            raise SpecError(WHERE, f"the figure {name} is {shape}, the loss {list(loss.shape)}", fix)
        if not isinstance(name, str) or not name or name == LOSS or BETWEEN in name:
            raise SpecError(WHERE, f"a figure is named {name!r}", f"use a name without commas, other than {LOSS}")
    return loss, dict(figures)


def as_output(made: Any) -> tuple[Tensor, str]:
    """Return the captured model's output and its name, from what a loss function has returned."""
    loss, figures = loss_and_figures(made)
    if not figures:
        return loss, LOSS
    values = [figure.detach().to(loss.dtype) for figure in figures.values()]
    return torch.stack([loss, *values], -1), BETWEEN.join([LOSS, *figures])


def figures_of(output: str) -> tuple[str, ...]:
    """Return the names of the figures from the output's.

    >>> figures_of("loss"), figures_of("loss,accuracy,margin")
    ((), ('accuracy', 'margin'))
    """
    return tuple(output.split(BETWEEN)[1:])


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
