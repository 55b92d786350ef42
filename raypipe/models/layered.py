"""What the rest of raypipe knows of a model: numbered layers, any run of which can be a stage.

A layer is a block of a GPT, or a sub-graph of a captured model. Stages form a chain: what a later stage reads of an
earlier one crosses every cut between them. Raw inputs (tokens, labels, images, masks) cross nothing: every device
reads the data, so a stage takes them from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypipe.models.running_statistics import RunningStatistics
from raypipe.models.task import ANY_LENGTH, Inputs, Lengths, Task
from raypipe.tensor import Division, Shard


class CutTensor(NamedTuple):
    """One tensor that crosses a cut."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    """A gradient comes back for it. Not for integers, booleans and what no parameter has a part in."""


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """A parameter that several layers hold: the same start, gradients summed, the same update."""

    name: str
    """What checkpoints call it: its first member's name."""
    parameters: tuple[tuple[int, str], ...]
    """(layer, parameter name) of each holder, the owner first. Names may be equal."""


class StageBody(nn.Module, ABC):
    """The layers of one stage, with their parameters."""

    @abstractmethod
    def forward(self, arrived: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """What crosses the cut behind the stage, from what crossed the one before it and the raw inputs it reads.

        The last stage returns the model's output.
        """

    @abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by a name that no plan changes; one tied inside the stage by its owner's."""

    @property
    def statistics(self) -> tuple[RunningStatistics, ...]:
        """What learns without gradients."""
        return ()


class LayeredModel(ABC):
    """A model before it is cut, in the precision that it runs in. Making one allocates no parameters."""

    names: tuple[str, ...]
    """What each layer is called in reports."""
    tied: tuple[TiedGroup, ...]
    flops: tuple[float, ...]
    """Forward floating-point operations of each layer on one sample."""
    task: Task
    division: Division | None = None
    """The share that this process holds of every divided parameter; None where it holds all of each."""
    shards: Mapping[str, Shard] = MappingProxyType({})
    """How each divided parameter is cut, by name."""
    batch_statistics: bool = False
    """What comes out for a sample depends on the other samples of its micro-batch (batch norm; a loss of its own)."""

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.names)

    @property
    def units(self) -> tuple[range, ...]:
        """Runs of layers that no cut divides, in order; each layer alone unless a model says otherwise."""
        return tuple(range(i, i + 1) for i in range(self.count))

    @abstractmethod
    def parameters(self, i: int) -> int:
        """Number of values in layer ``i``'s parameters, tied ones counted in each holder."""

    @abstractmethod
    def crossing(self, i: int, samples: int, lengths: Lengths = ANY_LENGTH) -> tuple[CutTensor, ...]:
        """What crosses a cut behind layer ``i`` for a micro-batch of ``samples``.

        Raw inputs that ``lengths`` does not name are as long as the longest sample's.

        Raises:
            RaypipeError: the model was captured for other lengths only.
        """

    @abstractmethod
    def reads(self, layers: Sequence[int]) -> frozenset[str]:
        """Raw inputs that these layers read; what the loss reads is the task's."""

    @abstractmethod
    def build_stage(self, layers: Sequence[int], seed: int, device: torch.device | str = "cpu") -> StageBody:
        """Consecutive layers with their start values, which follow from (seed, parameter) alone.

        Allocates only these layers' parameters; nothing is drawn from torch's global generators.
        """
