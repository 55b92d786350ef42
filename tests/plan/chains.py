"""The shortest step of a chain, to compare branches with."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.plan.branches import PASSES, Arranged, Branches, Cut, LayerCosts, ordered
from raypipe.plan.cut.layers import cut_layers
from raypipe.schedule.ir import StageGraph
from raypipe.schedule.shape import Shape
from raypipe.search.placements import placed


def as_chain(costs: LayerCosts, cut: Cut, devices: Sequence[int]) -> Arranged:
    """Make a chain, in which every result travels from stage to stage."""
    return Arranged(costs, cut, tuple(devices), StageGraph.chain(len(cut)))


def best_chain(costs: LayerCosts, devices: int, microbatches: int) -> Branches:
    """Return the shortest step of a chain: runs of layers, each of whose results travels from stage to stage."""
    result = []
    for name, passes in (("line", 1), *((way, p) for way in ("ring", "v") for p in PASSES[1:])):
        row = placed(name, Shape(devices=devices, microbatches=microbatches, chunks=passes))[0]
        if len(row) <= len(costs.whole):
            cut: Cut = tuple(map(tuple, cut_layers(costs.whole, (row,)).stages))
            result.append(ordered(as_chain(costs, cut, row), microbatches, None))
    return min(result, key=lambda one: one.makespan_s)
