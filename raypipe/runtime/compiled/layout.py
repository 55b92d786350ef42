"""The meaning of the inputs and outputs of a stage's compiled pieces; plain data, without the graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from raypipe.runtime.compiled.traced_keys import RandomPlaces


@dataclass(kw_only=True)
class GraphLayout:
    """The meaning of the inputs and outputs of a joint graph.

    Its inputs are ``parameters``, ``buffers``, what arrives, the raw ``inputs``, ``places``' tables and ``casts``, then
    the gradients of the differentiable outputs. Its outputs are the stage's, the moments of ``statistics``, and the
    gradients of ``trained`` and of the arrived tensors that ``takes_gradient``.
    """

    parameters: list[str]
    """Paths in the stage module."""
    buffers: list[str]
    inputs: list[str]
    places: RandomPlaces
    trained: list[int]
    """The trained parameters, by number."""
    takes_gradient: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    """Per output of the stage, whether it gets a gradient."""
    statistics: list[int]
    """The batch norms whose moments are outputs, by number among the stage's."""
    casts: list[tuple[int, torch.dtype]]
    """Copies of parameters in another dtype that the graph reads: number of the parameter and the dtype."""

    @property
    def outputs(self) -> int:
        """Number of outputs before the gradients."""
        return len(self.differentiable) + len(self.statistics)


class InputSlot(NamedTuple):
    """Where a piece finds one of its inputs."""

    source: Literal["given", "kept", "tangent", "handed"]
    """The forward's inputs; what the forward has kept; the outputs' gradients; what B hands to W."""
    number: int


class Gradient(NamedTuple):
    """The gradient of one parameter, by positions among the outputs of the piece that computes it."""

    parameter: int
    """Number of the parameter."""
    first: int
    """The gradient, or the left factor of the product that it is."""
    second: int | None = None
    """The right factor; None if ``first`` is the gradient."""
    shared: bool = False
    """Whether others may hold the memory of ``first``."""


@dataclass(kw_only=True)
class Interface:
    """The inputs and outputs of one piece."""

    slots: tuple[InputSlot, ...]
    gradients: tuple[Gradient, ...] = ()
    """The weight gradients that it computes."""
    back: tuple[int | None, ...] = ()
    """Per arrived tensor that gets one, the position of its gradient among the outputs; None if it is zero."""
    hands: int = 0
    """Where the outputs begin that B hands to W."""
