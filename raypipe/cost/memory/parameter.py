"""Bytes that one parameter takes on a device: the weight, its gradient and its optimizer state."""

from __future__ import annotations

from typing import NamedTuple

from raypipe.cost.stages import gradient_width
from raypipe.errors import SpecError, nearest
from raypipe.job.train_spec import OPTIMIZERS

MASTER = 4
"""Bytes of a master weight, and at least of a value of optimizer state: float32."""


class ParameterBytes(NamedTuple):
    """Bytes of one parameter. Weights stay float32 (or float64) under 16-bit autocast, and the rest is as wide."""

    weight: int
    gradient: int
    optimizer: int
    master: int = 0
    """The float32 copy that the optimizer updates, where weights are bfloat16; its state is float32 too."""
    rest: int = 0
    """More optimizer state of what is none of the matrices of Muon (``LayerProfile.matrices``)."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    def held(self, values: int, trained: int) -> float:
        """Bytes of ``values`` parameters of which ``trained`` are trained; of the others there are only weights."""
        return float(self.total * trained + self.weight * (values - trained))


def parameter_bytes(dtype: str, optimizer: str = "adamw", momentum: float = 0.0) -> ParameterBytes:
    """Bytes of one parameter for ``train``'s dtype, optimizer and momentum.

    Of the momentum, only whether an optimizer that reads it has any matters.

    >>> parameter_bytes("bfloat16", "adamw")
    ParameterBytes(weight=4, gradient=4, optimizer=8, master=0, rest=0)
    >>> parameter_bytes("bfloat16-true", "adamw")
    ParameterBytes(weight=2, gradient=2, optimizer=8, master=4, rest=0)

    Raises:
        SpecError: the optimizer is unknown.
    """
    kind = OPTIMIZERS.get(optimizer)
    if kind is None:
        raise SpecError("train.optimizer", f'"{optimizer}" is unknown', nearest(optimizer, OPTIMIZERS))
    width = gradient_width(dtype)
    state, master = max(width, MASTER), MASTER if width < MASTER else 0
    # Muon's momentum is among its values: it has one even where the factor is 0.
    values = kind.values + ("momentum" in kind.options and momentum > 0 and not kind.rest)
    return ParameterBytes(width, width, values * state, master, kind.rest * state)
