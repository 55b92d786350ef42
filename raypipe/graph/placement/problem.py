"""The placement problem as typed data: an operation graph, the hardware graph it is placed on, and routes through it.

Its solution is a placement with its schedule: every operation has a node, and starts as early as the order of work
allows.

Source: Pal et al. 2019, "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training", section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import networkx as nx
from pydantic import Field

from raypipe.errors import SpecError, nearest
from raypipe.job.field_types import Spec
from raypipe.job.reading import load_json

Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Bytes = Annotated[float, Field(ge=0, le=1e18)]


class PlacementOperation(Spec):
    """One operation of the graph."""

    name: Name
    seconds: Seconds | Annotated[dict[Name, Seconds], Field(min_length=1)]
    """Execution time: the same on every node, or by node name."""
    memory_bytes: Bytes = 0.0
    """What it occupies on its node during the whole step."""
    colocate: Name | None = None
    """Operations with the same word here are on the same node: a layer's forward and its gradients share weights."""

    def seconds_on(self, node: str) -> float:
        """Return the execution time on a node."""
        return self.seconds[node] if isinstance(self.seconds, dict) else self.seconds


class PlacementGraph(Spec):
    """Operations and what flows between them: a whole graph file."""

    operations: Annotated[tuple[PlacementOperation, ...], Field(min_length=1)]
    edges: tuple[tuple[Name, Name, Bytes], ...] = ()
    """(producer, consumer, bytes), one for each tensor."""

    @cached_property
    def by_name(self) -> Mapping[str, PlacementOperation]:
        """Operations by name."""
        return {op.name: op for op in self.operations}

    @cached_property
    def together(self) -> tuple[tuple[str, ...], ...]:
        """Operations that share a node, most of them alone, in the order of their first operation."""
        groups: dict[str, list[str]] = {}
        for op in self.operations:
            groups.setdefault(f"colocate {op.colocate}" if op.colocate is not None else f"op {op.name}", []).append(
                op.name
            )
        return tuple(map(tuple, groups.values()))

    def memory_of(self, names: Iterable[str]) -> float:
        """Bytes that operations occupy together."""
        return sum(self.by_name[name].memory_bytes for name in names)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names in a topological order.

        Raises:
            SpecError: the graph has a cycle; the error names it.
        """
        sorter = TopologicalSorter({op.name: () for op in self.operations})
        for source, target, _ in self.edges:
            sorter.add(target, source)
        try:
            return tuple(sorter.static_order())
        except CycleError as error:
            cycle = " -> ".join(error.args[1])
            raise SpecError("edges", f"the operations form a cycle: {cycle}", "remove one of these edges") from None

    def longest_paths(
        self, length: Mapping[str, float], transfer: Callable[[float], float] = lambda size: 0
    ) -> dict[str, float]:
        """Return the length of the longest path from each operation, with it, to the end; tensors take ``transfer``."""
        after: dict[str, list[tuple[str, float]]] = {name: [] for name in length}
        for source, target, size in self.edges:
            after[source].append((target, size))
        result: dict[str, float] = {}
        for name in reversed(self.order):
            result[name] = length[name] + max((transfer(size) + result[t] for t, size in after[name]), default=0)
        return result

    def check(self) -> None:
        """Check what single fields cannot say.

        Raises:
            SpecError: two operations have one name, an edge names an unknown operation, or there is a cycle.
        """
        _refuse_twins("operations", (op.name for op in self.operations))
        for n, (source, target, _) in enumerate(self.edges):
            for name in (source, target):
                if name not in self.by_name:
                    raise SpecError(f"edges.{n}", f'there is no operation "{name}"', nearest(name, list(self.by_name)))
        _ = self.order


class NodeSpec(Spec):
    """One compute node."""

    name: Name
    memory_bytes: Bytes | None = None
    """What the operations placed on it may occupy together; null: any amount."""


class LinkSpec(Spec):
    """A link: a tensor of n bytes takes ``n / bandwidth + latency``."""

    bandwidth_gb_s: Annotated[float, Field(gt=1e-9)]
    """In 10^9 bytes per second, in each direction; more than a byte per second."""
    latency_us: Annotated[float, Field(ge=0, le=1e12)] = 0.0

    def seconds(self, size: float) -> float:
        """Return the time to transfer a tensor of ``size`` bytes."""
        return size / (self.bandwidth_gb_s * 1e9) + self.latency_us * 1e-6


class HardwareGraph(Spec):
    """The content of a hardware file: compute nodes, routers, and links between them."""

    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]
    routers: tuple[Name, ...] = ()
    """Switches: tensors pass through, nothing runs there."""
    links: tuple[tuple[Name, Name, LinkSpec], ...] = ()
    """Links go both ways."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the compute nodes."""
        return tuple(node.name for node in self.nodes)

    def check(self) -> None:
        """Check what single fields cannot say.

        Raises:
            SpecError: two things have one name, a link ends nowhere, or a node cannot be reached from the others.
        """
        known = [*self.names, *self.routers]
        _refuse_twins("nodes and routers", known)
        for n, (a, b, _) in enumerate(self.links):
            for name in (a, b):
                if name not in known:
                    raise SpecError(f"links.{n}", f'there is no node or router "{name}"', nearest(name, known))
            if a == b:
                raise SpecError(f"links.{n}", f"joins {a} with itself", "give its two ends")
        reached = nx.node_connected_component(Routes(self).network, self.names[0])
        lost = [name for name in self.names if name not in reached]
        if lost:
            raise SpecError(
                "links", f"node {lost[0]} cannot be reached from node {self.names[0]}", "add a link between them"
            )


class Hop(NamedTuple):
    """One link of a route, in one direction."""

    link: int
    """Number of the link in the hardware file."""
    source: str
    target: str


Route = tuple[Hop, ...]
ORDER_ONLY = -1.0
"""Size of an edge that only orders two operations: nothing travels."""


class Routes:
    """The routes between the nodes of one hardware graph."""

    def __init__(self, hardware: HardwareGraph) -> None:
        self.links: list[LinkSpec] = [link for _, _, link in hardware.links]
        self.network = nx.MultiGraph()
        self.network.add_nodes_from((*hardware.names, *hardware.routers))
        self.network.add_edges_from((a, b, n) for n, (a, b, _) in enumerate(hardware.links))
        self.fastest = cache(self._fastest)
        self.seconds = cache(self._seconds)

    def _fastest(self, source: str, target: str, size: float) -> Route:
        """The route that takes a tensor of ``size`` bytes there first; empty if the nodes are the same."""

        def best(a: str, b: str, between: Mapping[int, Any]) -> int:
            return min(between, key=lambda n: self.links[n].seconds(max(size, 0.0)))

        def seconds(a: str, b: str, between: Mapping[int, Any]) -> float:
            return self.links[best(a, b, between)].seconds(max(size, 0.0))

        places = nx.dijkstra_path(self.network, source, target, seconds)
        return tuple(Hop(best(a, b, self.network[a][b]), a, b) for a, b in pairwise(places))

    def _seconds(self, source: str, target: str, size: float) -> float:
        """How long the fastest route takes: the sum over its links."""
        if size == ORDER_ONLY:
            return 0.0
        return sum(self.links[hop.link].seconds(size) for hop in self.fastest(source, target, size))

    def simple(self, source: str, target: str) -> Iterator[Route]:
        """Yield all routes that visit no node or router twice."""
        for edges in nx.all_simple_edge_paths(self.network, source, target):
            yield tuple(Hop(link, a, b) for a, b, link in edges)


def places(route: Route) -> list[str]:
    """Return the nodes and routers that a route visits, including its ends."""
    return [route[0].source, *(hop.target for hop in route)]


def load_problem(graph: Path, hardware: Path) -> tuple[PlacementGraph, HardwareGraph]:
    """Read and check both files.

    Raises:
        SpecError: a file cannot be read or holds a wrong key or value, or the two do not fit; the error names the file.
    """
    operations = load_json(graph, PlacementGraph, "raypipe graph MODEL -o FILE")
    machine = load_json(hardware, HardwareGraph, "an editor, after cluster/placement/two-v100.json")
    for path, checked in ((graph, operations.check), (hardware, machine.check)):
        try:
            checked()
        except SpecError as error:
            raise SpecError(f"{path}: {error.where}", error.why, error.fix) from None
    try:
        check_fit(operations, machine)
    except SpecError as error:
        raise SpecError(f"{graph}: {error.where}", error.why, error.fix) from None
    return operations, machine


def check_fit(graph: PlacementGraph, hardware: HardwareGraph) -> None:
    """Check that operation times name this hardware's nodes, and that memory is not too small from the outset.

    Raises:
        SpecError: they do not, or it is; the error names the operation or the limit.
    """
    limits = [node.memory_bytes for node in hardware.nodes]
    largest = None if None in limits else max(limit for limit in limits if limit is not None)
    for op in graph.operations:
        if isinstance(op.seconds, dict):
            for name in op.seconds:
                if name not in hardware.names:
                    raise SpecError(
                        f"{op.name}.seconds", f'there is no node "{name}"', nearest(name, list(hardware.names))
                    )
            missing = [name for name in hardware.names if name not in op.seconds]
            if missing:
                raise SpecError(f"{op.name}.seconds", f"has no time on node {missing[0]}", "give one for every node")
    for names in graph.together:
        if largest is not None and graph.memory_of(names) > largest:
            why = (
                f"{'with what shares its node ' if len(names) > 1 else ''}needs {graph.memory_of(names):g} bytes, "
                f"the largest node has {largest:g}"
            )
            raise SpecError(f"{names[0]}.memory_bytes", why, "use a node with more memory, or split the operation")
    needed = sum(op.memory_bytes for op in graph.operations)
    if largest is not None and needed > sum(limit or 0.0 for limit in limits):
        why = f"all operations need {needed:g} bytes, all nodes together have {sum(limit or 0.0 for limit in limits):g}"
        raise SpecError("memory_bytes", why, "add nodes or memory")


def _refuse_twins(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(where, f'the name "{name}" is given twice', "give each its own")
        seen.add(name)


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
