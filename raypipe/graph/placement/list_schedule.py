"""Find a placement quickly by list scheduling; the exact search starts from it.

Source: Topcuoglu, Hariri, Wu 2002, "Performance-effective and low-complexity task scheduling for heterogeneous
computing" (HEFT): operations by upward rank, each to the node on which it ends first.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from raypipe.graph.placement.problem import HardwareGraph, PlacementGraph
from raypipe.graph.placement.routes import Routes


def list_schedule(
    graph: PlacementGraph, hardware: HardwareGraph, routes: Routes, fixed_nodes: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]] | None:
    """Place operations by HEFT.

    ``fixed_nodes`` says where some operations are. Operations fill gaps between those already placed, so the order of
    work is by start time: the second result.
    """
    names = hardware.names
    mean = {op.name: sum(op.seconds_on(n) for n in names) / len(names) for op in graph.operations}
    rank = _upward_ranks(graph, routes, mean, names)
    incoming: dict[str, list[tuple[str, float]]] = {name: [] for name in mean}
    for source, target, size in graph.edges:
        incoming[target].append((source, size))
    free_bytes = {n.name: n.memory_bytes for n in hardware.nodes}
    busy: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    node: dict[str, str] = {}
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    position = {name: i for i, name in enumerate(graph.order)}
    group = {name: names for names in graph.together for name in names}
    home = {group[name]: place for name, place in (fixed_nodes or {}).items()}
    for name in sorted(mean, key=lambda op: (-rank[op], position[op])):
        op = graph.by_name[name]
        best: tuple[float, float, str] | None = None
        fixed = home.get(group[name])
        for place in names if fixed is None else (fixed,):
            left = free_bytes[place]
            if fixed is None and left is not None and graph.memory_of(group[name]) > left:
                continue
            ready = max((end[s] + routes.seconds(node[s], place, size) for s, size in incoming[name]), default=0.0)
            begin = _first_gap(busy[place], ready, op.seconds_on(place))
            if best is None or begin + op.seconds_on(place) < best[0]:
                best = (begin + op.seconds_on(place), begin, place)
        if best is None:
            return None
        end[name], start[name], node[name] = best
        left = free_bytes[node[name]]
        if fixed is None and left is not None:
            free_bytes[node[name]] = left - graph.memory_of(group[name])
        home[group[name]] = node[name]
        busy[node[name]].append((start[name], end[name]))
        busy[node[name]].sort()
    return node, sorted(mean, key=lambda op: (start[op], position[op]))


def _upward_ranks(
    graph: PlacementGraph, routes: Routes, mean: dict[str, float], names: tuple[str, ...]
) -> dict[str, float]:
    """Return the length of the longest path from each operation to the end, with mean times and transfers."""
    pairs = list(combinations(names, 2))
    outgoing: dict[str, list[tuple[str, float]]] = {name: [] for name in mean}
    for source, target, size in graph.edges:
        outgoing[source].append((target, size))

    def transfer(size: float) -> float:
        return sum(routes.seconds(a, b, size) for a, b in pairs) / len(pairs) if pairs else 0.0

    rank: dict[str, float] = {}
    for name in reversed(graph.order):
        rank[name] = mean[name] + max((transfer(size) + rank[t] for t, size in outgoing[name]), default=0.0)
    return rank


def _first_gap(busy: list[tuple[float, float]], ready: float, length: float) -> float:
    begin = ready
    for taken, until in busy:
        if begin + length <= taken:
            return begin
        begin = max(begin, until)
    return begin
