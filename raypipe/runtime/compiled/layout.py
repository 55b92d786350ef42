"""The inputs and outputs of a stage's compiled pieces: plain data, without the graphs.

Random keys are among the inputs, so that a compiled stage draws the very bits that the eager one draws. Every random
place of a stage reads one row of a table that the host makes for each micro-batch. The bits themselves are made by one
operator, ``raypipe::keyed_halves``, which compilers call and do not look into: integers that wrap are undefined in C++,
and no bit may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from raypipe.models.keyed_random import Keys, RandomKeys, halves_of_part
from raypipe.tensor.operators import share_of_tensor_rank

TRACED_STEP = -1
"""Step of the keys under which a stage is traced; no real step has it."""

_library = torch.library.Library("raypipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("keyed_halves(Tensor keys, int[] part, int[] whole) -> Tensor")  # type: ignore[no-untyped-call]


def _keyed_halves(keys: Tensor, part: list[int], whole: list[int]) -> Tensor:
    return halves_of_part(keys, part, whole, keys.device).contiguous()


def _shape(keys: Tensor, part: list[int], whole: list[int]) -> Tensor:
    return torch.empty((keys.shape[0], *part), dtype=torch.int16, device=keys.device)


_library.impl("keyed_halves", _keyed_halves, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("raypipe::keyed_halves", _shape, lib=_library)


@dataclass
class RandomPlaces:
    """The random places of a stage, in the order in which its forward comes to them."""

    own: list[int] = field(default_factory=list)
    """Sites that draw for every sample."""
    shared: list[int] = field(default_factory=list)
    """Sites whose draw all samples of a step share."""

    def tables(self, keys: RandomKeys, device: torch.device) -> list[Tensor]:
        """Return the keys of one micro-batch: int32 ``[places, keys, 2]`` for each kind of place that there is."""
        return [
            keys.table(sites, per_sample, device)
            for sites, per_sample in ((self.own, True), (self.shared, False))
            if sites
        ]


class TracedKeys(RandomKeys):
    """The keys under which a stage is traced.

    Args:
        samples: number of samples of the micro-batch.
        places: the stage's random places; without ``tables``, they are noted here.
        training: whether anything is drawn; see ``random_keys``.
        tables: what ``RandomPlaces.tables`` returns, as tensors of the trace; None to note the places only.
    """

    def __init__(
        self, samples: int, places: RandomPlaces, tables: Sequence[Tensor] | None, training: bool = True
    ) -> None:
        super().__init__(0, TRACED_STEP, [], training)
        self.samples, self.first = [0] * samples, 0
        self._places = places
        self._tables = None if tables is None else list(tables)

    def seeds(self, site: int, per_sample: bool, device: torch.device) -> Keys:
        """Return a row of a table; see ``RandomKeys.seeds``."""
        sites = self._places.own if per_sample else self._places.shared
        if self._tables is None:
            if site not in sites:
                sites.append(site)
            return torch.zeros(len(self.samples) if per_sample else 1, 2, dtype=torch.int32, device=device)
        return self._tables[0 if per_sample else -1][sites.index(site)]

    def halves(
        self,
        seeds: Keys,
        part: Sequence[int],
        whole: Sequence[int],
        device: torch.device,
        begin: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return the operator's result; see ``RandomKeys.halves``."""
        assert isinstance(seeds, Tensor)
        drawn: Tensor = torch.ops.raypipe.keyed_halves(seeds, list(part), list(whole))
        return drawn

    def share(self, halves: Tensor, dim: int, length: int) -> Tensor:
        """Return the operator's result; see ``RandomKeys.share``."""
        own: Tensor = share_of_tensor_rank(halves, dim, length)
        return own


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
    collectives: tuple[str, ...] = ()
    """Its collectives over tensor ranks, in the order in which it starts them."""
