"""Put a graph of layers on devices, as stages of a graph, so that a step is short.

Candidates differ in which device has which layer. Some give each device runs of layers in the order of the model's
code, the row of devices passed once or several times, as a chain is cut; but a branch in a run begins as soon as its
own inputs are there. One is the placement of a single micro-batch that ``graph.placement`` finds (DLPlacer), which
runs branches side by side. An order of tasks is searched for each, and then layers move from device to device while
that makes the step shorter. Of the steps that are nearly as short as the shortest, the one that sends least is taken.

Source: Pal et al. 2019 (the hybrid-parallelism paper), section 4, for the placement of one micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from raypipe.errors import RaypipeError, SpecError
from raypipe.graph.liveness import Result, StageEnds, stage_ends, stage_graph, stages_of
from raypipe.graph.placement.place import place
from raypipe.graph.placement.problem import HardwareGraph, LinkSpec, NodeSpec, PlacementGraph, PlacementOperation
from raypipe.plan.cut.layers import cut_layers
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import BW
from raypipe.schedule.shape import Shape
from raypipe.search import search
from raypipe.search.placements import placed

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


PASSES = (1, 2, 3)
"""How often a row of devices is passed."""
QUICK_S = 0.15
"""For a first order of a candidate."""
PLACE_S = 15.0
"""For the placement of one micro-batch, if a step has no more; it is one candidate of many otherwise."""
NEAR = 0.02
"""Steps that differ by less are taken to be equally long: costs are not known better."""
STARTS = 3
"""Candidates from which layers are moved."""
MOVE_S = 6.0
"""For moving layers between devices."""


@dataclass(frozen=True)
class Branches:
    """Stages on devices and an order of a step's tasks."""

    arranged: Arranged
    schedule: Schedule
    makespan_s: float


def choose_branches(costs: LayerCosts, devices: int, microbatches: int, *, move_s: float = MOVE_S) -> Branches:
    """Return the shortest step that was found on so many devices.

    Raises:
        SpecError: there are more devices than layers.
    """
    _check(costs, devices)
    result = [
        ordered(Arranged.as_branches(costs, rows), microbatches, QUICK_S)
        for rows in dict.fromkeys(_candidates(costs, devices, microbatches))
    ]
    for start in sorted(result, key=lambda one: one.makespan_s)[:STARTS]:
        result += _moved(start, devices, microbatches, move_s / STARTS)
    shortest = min(one.makespan_s for one in result)
    near = [one for one in result if one.makespan_s <= shortest * (1 + NEAR)]
    best = min(near, key=lambda one: (one.arranged.sent_bytes, one.makespan_s))
    final = ordered(best.arranged, microbatches, None, best.schedule)
    return min(final, best, key=lambda one: one.makespan_s)


def ordered(arranged: Arranged, microbatches: int, budget_s: float | None, start: Schedule | None = None) -> Branches:
    """Search an order of a step's tasks for stages on devices; ``start`` is one to begin with."""
    result = search(
        (arranged.devices,),
        microbatches,
        arranged.table,
        graph=arranged.graph,
        split=False,
        budget_s=budget_s,
        starts=() if start is None else (start,),
    )
    return Branches(arranged, result.schedule, result.makespan)


def _check(costs: LayerCosts, devices: int) -> None:
    if devices > len(costs.whole):
        raise SpecError(
            "parallel.stages", f"{devices} devices for a model of {len(costs.whole)} pieces", "use fewer devices"
        )


def _candidates(costs: LayerCosts, devices: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """The device of each layer."""
    layers = len(costs.whole)
    for name, passes in (("line", 1), *((way, p) for way in ("ring", "v") for p in PASSES[1:])):
        row = placed(name, Shape(devices=devices, microbatches=microbatches, chunks=passes))[0]
        if len(row) <= layers and (devices > 1 or passes == 1):
            cut = cut_layers(costs.whole, (row,))
            yield tuple(device for device, own in zip(row, cut.stages, strict=True) for _ in own)
    if devices > 1:
        yield from _one_microbatch(costs, devices, microbatches)


def _one_microbatch(costs: LayerCosts, devices: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """The placement with which one micro-batch ends soonest."""
    operations, edges = [], []
    for i in range(len(costs.whole)):
        for kind, seconds in (("F", costs.forward[i]), (BW, costs.input_grad[i] + costs.weight_grad[i])):
            operations.append(PlacementOperation(name=f"{i} {kind}", seconds=seconds, colocate=str(i)))
        edges.append((f"{i} F", f"{i} BW", 0.0))
    for one, there, back in zip(costs.results, costs.result_bytes, costs.gradient_bytes, strict=True):
        for reader in one.read_by:
            edges.append((f"{one.made_by} F", f"{reader} F", there))
            if back:
                edges.append((f"{reader} BW", f"{one.made_by} BW", back))
    names = [f"device {d}" for d in range(devices)]
    link = LinkSpec(bandwidth_gb_s=min(1e9, costs.bytes_per_s / 1e9), latency_us=costs.latency_s * 1e6)
    hardware = HardwareGraph(
        nodes=tuple(NodeSpec(name=n) for n in names),
        links=tuple((a, b, link) for k, a in enumerate(names) for b in names[k + 1 :]),
    )
    try:
        budget_s = PLACE_S if microbatches == 1 else PLACE_S / 10
        result = place(PlacementGraph(operations=tuple(operations), edges=tuple(edges)), hardware, budget_s)
    except RaypipeError:  # none within the time: the runs of layers remain
        return
    row = tuple(names.index(result.node[f"{i} F"]) for i in range(len(costs.whole)))
    if len(set(row)) == devices:
        yield row


def _moved(best: Branches, devices: int, microbatches: int, seconds: float) -> list[Branches]:
    """Move stages, and layers at their borders, to other devices while that makes the step shorter; return each one
    that did."""
    result: list[Branches] = []
    deadline = time.monotonic() + seconds
    tried: set[tuple[int, ...]] = set()
    better = True
    while better and time.monotonic() < deadline:
        better = False
        for row in _neighbours(best.arranged, devices):
            if row in tried or len(set(row)) < devices:
                continue
            tried.add(row)
            one = ordered(Arranged.as_branches(best.arranged.costs, row), microbatches, QUICK_S)
            if one.makespan_s < best.makespan_s * (1 - 1e-6):
                best, better = one, True
                result.append(one)
                break
            if time.monotonic() > deadline:
                break
    return result


def _neighbours(arranged: Arranged, devices: int) -> Iterator[tuple[int, ...]]:
    """The device of each layer, one stage or the first or last layers of one moved; large moves first."""
    row = [0] * sum(map(len, arranged.cut))
    for own, device in zip(arranged.cut, arranged.devices, strict=True):
        for i in own:
            row[i] = device
    busy = [0.0] * devices
    for i, device in enumerate(row):
        busy[device] += arranged.costs.whole[i]
    stages = sorted(range(len(arranged.cut)), key=lambda s: -busy[arranged.devices[s]])
    for part in (1, 2, 4, 8):
        for s in stages:
            own = arranged.cut[s]
            count = -(-len(own) // part)
            if part > 1 and count == len(own):
                continue
            for some in dict.fromkeys((own[:count], own[-count:])):
                for device in sorted(range(devices), key=busy.__getitem__):
                    if device != arranged.devices[s]:
                        yield tuple(device if i in some else d for i, d in enumerate(row))
