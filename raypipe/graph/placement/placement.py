"""A placement with its schedule: every operation has a node, and starts as early as the order of work allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from raypipe.graph.placement.problem import HardwareGraph, PlacementGraph, Route, Routes, places


class TensorTransfer(NamedTuple):
    """The transfer of one edge's tensor over one hop of its route."""

    edge: int
    hop: int


Event = str | TensorTransfer
"""An operation, given by its name, or a transfer."""


@dataclass(frozen=True)
class Placement:
    """A feasible placement, with a lower bound of the makespan."""

    node: Mapping[str, str]
    """Node of every operation."""
    start_s: Mapping[str, float]
    routes: Mapping[int, Route]
    """Route of every edge whose ends are on different nodes, by the edge's number."""
    makespan_s: float
    bound_s: float
    """Lower bound of the makespan of any placement."""

    @property
    def gap(self) -> float:
        """Largest share of the makespan that a better placement could save."""
        return 1 - self.bound_s / self.makespan_s if self.makespan_s else 0.0

    @property
    def optimal(self) -> bool:
        """Return whether no placement is shorter, up to the rounding of times to the solver's ticks."""
        return self.gap <= 1e-6

    def document(self, graph: PlacementGraph) -> dict[str, Any]:
        """The JSON of ``raypipe place``."""
        return {
            "placement": dict(self.node),
            "start_s": dict(self.start_s),
            "routes": [{"edge": list(graph.edges[n][:2]), "route": places(r)} for n, r in sorted(self.routes.items())],
            "makespan_s": self.makespan_s,
            "bound_s": self.bound_s,
            "optimal": self.optimal,
            "gap": self.gap,
        }


def timed(
    graph: PlacementGraph,
    routes: Routes,
    node: Mapping[str, str],
    order: Sequence[Event],
    chosen: Mapping[int, Route] | None = None,
) -> tuple[dict[str, float], dict[int, Route], float]:
    """Start everything as early as possible in a given order of work.

    Args:
        graph: the operations.
        routes: of the hardware.
        node: node of every operation.
        order: all operations, each after its predecessors, which gives the order of work on every node. With
            contention it also has every transfer, after its producer and its earlier hops, which gives the order of
            work on every link.
        chosen: with contention, the route of each edge that crosses nodes; a link then carries one tensor at a time in
            each direction. None: links are never busy, and the fastest routes are taken.

    Returns:
        The start of every operation in seconds, the routes taken, and the makespan in seconds.
    """
    incoming: dict[str, list[int]] = {}
    for n, (_, target, _) in enumerate(graph.edges):
        incoming.setdefault(target, []).append(n)
    if chosen is None:
        taken = {
            n: routes.fastest(node[a], node[b], size)
            for n, (a, b, size) in enumerate(graph.edges)
            if node[a] != node[b]
        }
    else:
        taken = dict(chosen)
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    arrived: dict[int, float] = {}  # by edge, when its tensor has passed its latest hop
    free: dict[object, float] = {}
    for event in order:
        if isinstance(event, TensorTransfer):
            source, _, size = graph.edges[event.edge]
            hop = taken[event.edge][event.hop]
            link = routes.links[hop.link]
            begin = max(arrived.get(event.edge, ends[source]), free.get((hop.link, hop.source), 0.0))
            busy = size / (link.bandwidth_gb_s * 1e9)
            free[(hop.link, hop.source)] = begin + busy
            arrived[event.edge] = begin + busy + link.latency_us * 1e-6
            continue
        begin = free.get(node[event], 0.0)
        for n in incoming.get(event, ()):
            source, _, size = graph.edges[n]
            if n not in taken:
                begin = max(begin, ends[source])
            elif chosen is None:
                begin = max(begin, ends[source] + routes.seconds(node[source], node[event], size))
            else:
                begin = max(begin, arrived[n])
        starts[event] = begin
        ends[event] = free[node[event]] = begin + graph.by_name[event].seconds_on(node[event])
    return starts, taken, max(ends.values())


# A placement found quickly by list scheduling; the exact search starts from it.
#
# Source: Topcuoglu, Hariri, Wu 2002, "Performance-effective and low-complexity task scheduling for heterogeneous
# computing" (HEFT): operations by upward rank, each to the node on which it ends first.


def list_schedule(
    graph: PlacementGraph, hardware: HardwareGraph, routes: Routes, fixed_nodes: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]] | None:
    """Place operations by HEFT.

    ``fixed_nodes`` says where some operations are. Operations fill gaps between those already placed, so the order of
    work is by start time: the second result.
    """
    names = hardware.names
    mean = {op.name: sum(op.seconds_on(n) for n in names) / len(names) for op in graph.operations}
    pairs = list(combinations(names, 2))
    rank = graph.longest_paths(
        mean, lambda size: sum(routes.seconds(a, b, size) for a, b in pairs) / max(1, len(pairs))
    )
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


def _first_gap(busy: list[tuple[float, float]], ready: float, length: float) -> float:
    begin = ready
    for taken, until in busy:
        if begin + length <= taken:
            return begin
        begin = max(begin, until)
    return begin
