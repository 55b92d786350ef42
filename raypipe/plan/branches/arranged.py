"""A model's layers on devices, as stages of a graph: its edges, the bytes on them, and the costs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from raypipe.graph.liveness import Result, StageEnds, stage_ends, stage_graph, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import StageGraph

Cut = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of a micro-batch, by layer and by result; times in seconds."""

    results: tuple[Result, ...]
    result_bytes: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    """Of the gradient that goes back for each result; 0 where none does."""
    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    latency_s: float = 0.0
    """Of a message between devices."""
    bytes_per_s: float = float("inf")
    """Of a link between two devices, in each direction."""

    @cached_property
    def whole(self) -> tuple[float, ...]:
        """Seconds of each layer's forward and backward."""
        return tuple(map(sum, zip(self.forward, self.input_grad, self.weight_grad, strict=True)))


@dataclass(frozen=True)
class Arranged:
    """Stages on devices."""

    costs: LayerCosts
    cut: Cut
    """Layers of each stage."""
    devices: tuple[int, ...]
    """Device of each stage."""
    graph: StageGraph
    """Which stages talk."""
    ends: tuple[StageEnds, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", stage_ends(self.costs.results, self.cut, self.graph, self.devices))

    @staticmethod
    def as_branches(costs: LayerCosts, device_of_layer: Sequence[int]) -> Arranged:
        """Make the stages of layers on these devices; a result goes straight to the devices that read it."""
        cut, devices = stages_of(costs.results, device_of_layer)
        return Arranged(costs, cut, devices, stage_graph(costs.results, cut, devices))

    @staticmethod
    def as_chain(costs: LayerCosts, cut: Cut, devices: Sequence[int]) -> Arranged:
        """Make a chain, in which every result travels from stage to stage."""
        return Arranged(costs, cut, tuple(devices), StageGraph.chain(len(cut)))

    @cached_property
    def edge_bytes(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Per edge, bytes of activations and of gradients of a micro-batch."""
        costs = self.costs
        return {
            (s, n): (sum(costs.result_bytes[r] for r in some), sum(costs.gradient_bytes[r] for r in some))
            for s, ends in enumerate(self.ends)
            for n, some in ends.leaves.items()
        }

    @property
    def sent_bytes(self) -> float:
        """Bytes of activations and gradients that a micro-batch sends between devices."""
        return sum(sum(both) for (a, b), both in self.edge_bytes.items() if self.devices[a] != self.devices[b])

    @cached_property
    def table(self) -> CostTable:
        """Costs of stages, and of edges between devices: a latency, and the activation's bytes over the bandwidth."""
        costs = self.costs
        zeros = (0.0,) * len(self.cut)

        def of(layer: Sequence[float]) -> tuple[float, ...]:
            return tuple(sum(layer[i] for i in own) for own in self.cut)

        return CostTable(
            forward=of(costs.forward),
            input_grad=of(costs.input_grad),
            weight_grad=of(costs.weight_grad),
            recompute=of(costs.forward),
            all_reduce=zeros,
            update=zeros,
            comm={edge: costs.latency_s + max(both) / costs.bytes_per_s for edge, both in self.edge_bytes.items()},
        )
