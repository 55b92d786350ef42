"""Stage IO specs, known before a stage runs, so that receivers can post buffers of the right size in advance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from raypipe.graph.liveness import StageEnds, stage_ends
from raypipe.models import BodyEnds, LayeredModel, Lengths
from raypipe.runtime.transport.channel import StageIOSpec, TensorSpec
from raypipe.schedule.ir import StageGraph

Edge = tuple[int, int]
"""(sending stage, receiving stage) of activations; gradients go the other way."""


class StageIOSpecs(Mapping[Edge, StageIOSpec]):
    """Per edge of the stage graph, the tensors sent for a micro-batch of ``samples``, and the gradients sent back.

    As a mapping, it gives the specs of micro-batches that are padded to the longest sample of all.

    Args:
        model: the model.
        cut: layers of each stage.
        samples: of a micro-batch.
        graph: which stages talk; None for a chain.
        devices: device of each stage, in any replica; they matter where the graph is no chain.
    """

    def __init__(
        self,
        model: LayeredModel,
        cut: Sequence[Sequence[int]],
        samples: int,
        graph: StageGraph | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        self.model, self.samples = model, samples
        self.ends = stage_ends(model.results, cut, graph or StageGraph.chain(len(cut)), devices)
        """What each stage exchanges with which."""
        self._known: dict[tuple[Edge, tuple[tuple[str, int], ...]], StageIOSpec] = {}

    def ends_of(self, stage: int) -> BodyEnds:
        """Return all results that a stage receives and sends on."""
        return BodyEnds(self.ends[stage].arriving, self.ends[stage].leaving)

    def of(self, edge: Edge, lengths: Lengths) -> StageIOSpec:
        """Return an edge's spec for micro-batches of these lengths, from the shapes the model was captured with.

        Raises:
            RaypipeError: the model was captured for other lengths only.
        """
        key = (edge, tuple(lengths.items()))
        found = self._known.get(key)
        if found is None:
            tensors = self.model.tensors(self.ends[edge[0]].leaves[edge[1]], self.samples, lengths)
            found = self._known[key] = StageIOSpec(
                act=tuple(TensorSpec(t.shape, t.dtype) for t in tensors),
                differentiable=tuple(t.differentiable for t in tensors),
            )
        return found

    def arriving(self, stage: int, lengths: Lengths) -> tuple[TensorSpec, ...]:
        """Return the tensors that a stage receives, from all stages."""
        return tuple(spec for source in self.ends[stage].arrives for spec in self.of((source, stage), lengths).act)

    def __getitem__(self, edge: Edge) -> StageIOSpec:
        if edge[0] not in range(len(self.ends)) or edge[1] not in self.ends[edge[0]].leaves:
            raise KeyError(edge)
        return self.of(edge, {})

    def __iter__(self) -> Iterator[Edge]:
        return iter([(s, n) for s, ends in enumerate(self.ends) for n in ends.leaves])

    def __len__(self) -> int:
        return sum(len(ends.leaves) for ends in self.ends)


# Which of a stage's tensors, and of their gradients, belong to the message from or to which other stage.


@dataclass(frozen=True, slots=True)
class Ports:
    """Positions of the tensors of each message, by the other stage."""

    sends: Mapping[int, tuple[int, ...]]
    """Among the stage's outputs."""
    returned: Mapping[int, tuple[int, ...]]
    """Of the gradients that a later stage returns, among those of all outputs that a gradient is received for."""
    returns: Mapping[int, tuple[int, ...]]
    """Of the gradients for an earlier stage, among those of all arrived tensors whose gradient is sent back."""

    @staticmethod
    def of(ends: StageEnds, takes_gradient: Sequence[bool], gives_gradient: Sequence[bool]) -> Ports:
        """Number a stage's tensors.

        Args:
            ends: what it exchanges with other stages.
            takes_gradient: per arriving result, whether its gradient is sent back.
            gives_gradient: per leaving result, whether a gradient is received for it.
        """
        outputs = {result: i for i, result in enumerate(ends.leaving)}
        wanted = [result for result, gives in zip(ends.leaving, gives_gradient, strict=False) if gives]
        gradients = {result: i for i, result in enumerate(wanted)}
        returns: dict[int, tuple[int, ...]] = {}
        flags, made = iter(takes_gradient), 0
        for source, results in ends.arrives.items():
            count = sum(next(flags) for _ in results)
            returns[source] = tuple(range(made, made + count))
            made += count
        return Ports(
            {n: tuple(outputs[r] for r in results) for n, results in ends.leaves.items()},
            {n: tuple(gradients[r] for r in results if r in gradients) for n, results in ends.leaves.items()},
            returns,
        )

    def summed(self, arrived: Sequence[tuple[int, tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
        """Return the gradients of the stage's outputs: where several stages read one, theirs are added.

        Args:
            arrived: per message, the stage that sent it, and its gradients.
        """
        if len(arrived) == 1:  # the usual case, short as it is in every backward
            stage, gradients = arrived[0]
            if self.returned[stage] == tuple(range(len(gradients))):
                return gradients
        total: dict[int, Tensor] = {}
        for stage, gradients in arrived:
            for i, gradient in zip(self.returned[stage], gradients, strict=True):
                total[i] = total[i] + gradient if i in total else gradient
        return tuple(total[i] for i in sorted(total))
