"""Place an operation graph on a hardware graph so that a step is as short as possible, with a lower bound for it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

from raypipe.errors import RunError, SpecError
from raypipe.graph.placement.cp_model import exchangeable, solve
from raypipe.graph.placement.problem import (
    ORDER_ONLY,
    Event,
    HardwareGraph,
    NodeSpec,
    Placement,
    PlacementGraph,
    PlacementOperation,
    Route,
    Routes,
    TensorTransfer,
    list_schedule,
    timed,
)

EXACT = 1e-12
"""Relative rounding error from summing times in another order."""


def place(
    graph: PlacementGraph, hardware: HardwareGraph, budget_s: float = 60.0, contention: bool = False
) -> Placement:
    """Find the placement with the smallest makespan that the given time allows.

    Args:
        graph, hardware: checked specs (``load_problem``).
        budget_s: longest search, in seconds.
        contention: whether a link carries one tensor at a time in each direction, and routes may differ from the
            fastest; otherwise, as in the paper, transfers never wait for each other.

    Raises:
        SpecError: no placement keeps every node within its memory.
        RunError: no placement was found in the given time, and it was not proven that there is none.
    """
    routes = Routes(hardware)
    bound_s = _bound(graph, hardware)
    first = list_schedule(graph, hardware, routes)
    best: Placement | None = None
    if first is not None:
        best = Placement(*_started(graph, routes, *first, contention), bound_s)
        if best.makespan_s <= bound_s * (1 + EXACT):
            return replace(best, bound_s=best.makespan_s)
    if not contention:
        best, bound_s, done = _by_segments(graph, hardware, routes, budget_s / 2, best, bound_s)
        if done and best is not None:
            return best
    horizon_s = best.makespan_s if best is not None else _serial(graph, hardware, routes)
    result = solve(graph, hardware, routes, horizon_s, budget_s, best, contention)
    if result.status == "infeasible":
        needed = sum(op.memory_bytes for op in graph.operations)
        why = (
            "no placement keeps every node within its memory: the operations, "
            f"{needed:g} bytes in all, cannot be divided that way"
        )
        raise SpecError("memory_bytes", why, "give a node more memory, or split large operations")
    bound_s = max(bound_s, result.bound_s)
    if result.node is not None:
        starts, taken, makespan_s = timed(graph, routes, result.node, result.order, result.routes)
        if best is None or makespan_s <= best.makespan_s:
            best = Placement(result.node, starts, taken, makespan_s, bound_s)
    if best is None:
        raise RunError("raypipe place", f"found no placement within {budget_s:g} s", "give a longer --budget")
    # The solver's bound may be slightly below its own optimum, because times are rounded down.
    proven = result.status == "optimal" and best.makespan_s - bound_s <= 1e-5 * best.makespan_s
    final = best.makespan_s if proven else min(bound_s, best.makespan_s)
    return Placement(best.node, best.start_s, best.routes, best.makespan_s, final)


def _by_segments(
    graph: PlacementGraph,
    hardware: HardwareGraph,
    routes: Routes,
    budget_s: float,
    best: Placement | None,
    bound_s: float,
) -> tuple[Placement | None, float, bool]:
    """The better of ``best`` and what solving piece by piece finds, the bound, and whether the two meet."""
    joined = solve_by_segments(graph, hardware, routes, budget_s)
    if joined is None:
        return best, bound_s, False
    bound_s = max(bound_s, joined.bound_s)
    loads = {node.name: 0.0 for node in hardware.nodes}
    for name, place_of in joined.node.items():
        loads[place_of] += graph.by_name[name].memory_bytes
    if all(node.memory_bytes is None or loads[node.name] <= node.memory_bytes for node in hardware.nodes):
        starts, taken, makespan_s = timed(graph, routes, joined.node, joined.order)
        if best is None or makespan_s < best.makespan_s:
            best = Placement(joined.node, starts, taken, makespan_s, bound_s)
    if best is None or best.makespan_s > bound_s * (1 + 1e-9):
        return best, bound_s, False
    return replace(best, bound_s=best.makespan_s), bound_s, True


def _started(
    graph: PlacementGraph, routes: Routes, node: dict[str, str], order: list[str], contention: bool
) -> tuple[dict[str, str], dict[str, float], dict[int, Route], float]:
    """Time an order of operations; with contention, tensors are sent by the fastest route as soon as they are made."""
    if not contention:
        return node, *timed(graph, routes, node, order)
    chosen = {
        n: routes.fastest(node[a], node[b], size) for n, (a, b, size) in enumerate(graph.edges) if node[a] != node[b]
    }
    events: list[Event] = []
    for name in order:
        events.append(name)
        for n, route in chosen.items():
            if graph.edges[n][0] == name:
                events += [TensorTransfer(n, hop) for hop in range(len(route))]
    return node, *timed(graph, routes, node, events, chosen)


def _bound(graph: PlacementGraph, hardware: HardwareGraph) -> float:
    """No placement is shorter than the longest path, nor than all work divided over all nodes."""
    names = hardware.names
    least = {op.name: min(op.seconds_on(node) for node in names) for op in graph.operations}
    return max(max(graph.longest_paths(least).values()), sum(least.values()) / len(names))


def _serial(graph: PlacementGraph, hardware: HardwareGraph, routes: Routes) -> float:
    """Everything one after the other, with every tensor sent along the slowest of the fastest routes."""
    names = hardware.names
    work = sum(max(op.seconds_on(node) for node in names) for op in graph.operations)
    sent = sum(max(routes.seconds(a, b, size) for a in names for b in names) for _, _, size in graph.edges)
    return work + sent


# Divide a placement problem at operations that everything else comes before or after, and solve the pieces exactly.
#
# Such an operation, a *gate*, splits time: nothing runs on both sides of it at once. The joined results of a block's
# branches are one, and so is their gradient. Between two gates lies a segment; segments that hold operations of the
# same colocated group (a block's forward and its backward) make one piece. How long a piece takes depends on the rest
# only through the nodes of the gates around it, so the best placement follows by dynamic programming over those
# nodes, and a model of many blocks costs as much as so many small problems.


@dataclass(frozen=True)
class Joined:
    """The pieces' solutions put together, memory aside."""

    node: dict[str, str]
    order: list[str]
    bound_s: float
    """No placement is shorter, whatever the memory."""


@dataclass(frozen=True)
class _Solved:
    """A piece with its gates on certain nodes."""

    node: Mapping[str, str]
    order: list[str]
    seconds: float
    bound_s: float


@dataclass(frozen=True)
class _Piece:
    segments: tuple[int, ...]
    first: int | None
    """Group of the gate before it in the chain of pieces; None at the start."""
    last: int | None


def solve_by_segments(graph: PlacementGraph, hardware: HardwareGraph, routes: Routes, budget_s: float) -> Joined | None:
    """Place a graph piece by piece, without memory limits; None where it does not divide into a chain of pieces."""
    gates = _gates(graph, hardware, routes)
    if len(gates) < 2:
        return None
    segment = _segments(graph, gates)
    group = {name: number for number, names in enumerate(graph.together) for name in names}
    pieces = _pieces(graph, gates, segment, group)
    if pieces is None:
        return None
    deadline = time.monotonic() + budget_s
    alike = exchangeable(graph, hardware, routes)
    names = hardware.names
    gate_seconds: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(names, 0.0))
    for gate in gates:
        for node in names:
            gate_seconds[group[gate]][node] += graph.by_name[gate].seconds_on(node)
    # By node of the piece's last gate: (seconds, bound, solutions so far, nodes of the gates' groups).
    best: dict[str | None, tuple[float, float, list[_Solved], dict[int, str]]] = {None: (0.0, 0.0, [], {})}
    if pieces[0].first is not None:
        alone = gate_seconds[pieces[0].first]
        best = {n: (alone[n], alone[n], [], {pieces[0].first: n}) for n in names}
    kept: dict[tuple[int, str | None, str | None], _Solved] = {}
    for number, piece in enumerate(pieces):
        after: dict[str | None, tuple[float, float, list[_Solved], dict[int, str]]] = {}
        ends: list[str | None] = [None] if piece.last is None else list(names)
        for (before, (spent, bound, done, homes)), end in product(best.items(), ends):
            canonical = _canonical(before, end, alike)
            key = (number, *canonical)
            if key not in kept:
                left = len(pieces) - number
                share = max(0.1, (deadline - time.monotonic()) / left / len(ends))
                homes_of = dict(zip((piece.first, piece.last), canonical, strict=True))
                kept[key] = _solve_piece(graph, hardware, routes, gates, segment, piece, group, homes_of, share)
            result = _renamed(kept[key], dict(zip(canonical, (before, end), strict=True)), names)
            own = gate_seconds[piece.last][end] if piece.last is not None and end is not None else 0.0
            total = spent + result.seconds + own
            least = bound + result.bound_s + own
            known = after.get(end)
            if known is None or total < known[0]:
                chosen = {**homes, **({piece.last: end} if piece.last is not None and end is not None else {})}
                after[end] = (total, min(least, known[1]) if known else least, [*done, result], chosen)
            else:
                after[end] = (known[0], min(least, known[1]), known[2], known[3])
        best = after
    seconds, _, solved, homes = min(best.values(), key=lambda entry: entry[0])
    bound_s = min(entry[1] for entry in best.values())
    placed = {gate: homes[group[gate]] for gate in gates}
    ranks: dict[str, int] = {}
    for result in solved:
        placed |= result.node
        ranks |= {name: i for i, name in enumerate(result.order)}
    position = {name: i for i, name in enumerate(graph.order)}
    when = {gate: 2 * i for i, gate in enumerate(gates)} | {name: 2 * s - 1 for name, s in segment.items()}
    order = sorted(placed, key=lambda name: (when[name], ranks.get(name, 0), position[name]))
    return Joined(placed, order, min(bound_s, seconds))


def _gates(graph: PlacementGraph, hardware: HardwareGraph, routes: Routes) -> list[str]:
    """Operations that every other one is an ancestor or a descendant of, and that no tensor passes by; in order."""
    number = {name: i for i, name in enumerate(graph.order)}
    outgoing: dict[str, list[str]] = defaultdict(list)
    for source, target, _ in graph.edges:
        outgoing[source].append(target)
    after: dict[str, int] = {}
    for name in reversed(graph.order):
        after[name] = 0
        for target in outgoing[name]:
            after[name] |= after[target] | 1 << number[target]
    before = dict.fromkeys(graph.order, 0)
    for name in graph.order:
        for target in outgoing[name]:
            before[target] |= before[name] | 1 << number[name]
    count = len(graph.order)
    result = [name for name in graph.order if before[name].bit_count() + after[name].bit_count() == count - 1]
    group = {name: names for names in graph.together for name in names}
    passed = [0] * (count + 1)
    for source, target, size in graph.edges:
        free = group[source] is group[target] or not any(
            routes.seconds(a, b, size) for a in hardware.names for b in hardware.names if a != b
        )
        if not free:
            passed[number[source] + 1] += 1
            passed[number[target]] -= 1
    crossing, total = [], 0
    for i in range(count):
        total += passed[i]
        crossing.append(total)
    return [name for name in result if crossing[number[name]] == 0]


def _segments(graph: PlacementGraph, gates: list[str]) -> dict[str, int]:
    """By operation that is no gate, how many gates come before it."""
    position = {gate: i for i, gate in enumerate(gates)}
    result: dict[str, int] = {}
    passed = 0
    for name in graph.order:  # topological: a gate stands after all its ancestors and before all its descendants
        if name in position:
            passed = position[name] + 1
        else:
            result[name] = passed
    return result


def _pieces(
    graph: PlacementGraph, gates: list[str], segment: Mapping[str, int], group: Mapping[str, int]
) -> list[_Piece] | None:
    """The pieces as a chain, each between two groups of gates; None where they make no chain."""
    count = len(gates) + 1
    gate_groups = {group[gate] for gate in gates}
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    homes: dict[int, int] = {}
    for name, s in segment.items():
        if group[name] in gate_groups:
            return None  # an inner operation is bound to a gate: the gate's node would not be all that matters
        if group[name] in homes:
            parent[root(s)] = root(homes[group[name]])
        homes[group[name]] = s
    members: dict[int, list[int]] = defaultdict(list)
    for s in range(count):
        members[root(s)].append(s)
    occupied = set(segment.values())
    links: list[tuple[tuple[int, ...], list[int]]] = []
    for segments in members.values():
        touched = dict.fromkeys(group[gates[g]] for s in segments for g in (s - 1, s) if 0 <= g < len(gates))
        if len(touched) > 2:
            return None
        if len(touched) == 1 and not occupied & set(segments):
            continue  # nothing between gates of one group, or beyond the last
        links.append((tuple(segments), list(touched)))
    return _chain(links)


def _chain(links: list[tuple[tuple[int, ...], list[int]]]) -> list[_Piece] | None:
    """Order pieces so that each hands on to the next the group of gates that they share."""
    at: dict[int, list[int]] = defaultdict(list)
    for i, (_, touched) in enumerate(links):
        for g in touched:
            at[g].append(i)
    if not links or any(len(pieces) > 2 for pieces in at.values()):
        return None
    # Begin at a piece that only one group joins to the others: with the group that it shares with none, if it has one.
    ends: list[tuple[int, int | None]] = [
        (i, g) for i, (_, touched) in enumerate(links) for g in touched if len(at[g]) == 1 and len(touched) == 2
    ]
    ends += [(i, None) for i, (_, touched) in enumerate(links) if len(touched) == 1]
    if not ends:
        return None
    here, entry = ends[0]
    result: list[_Piece] = []
    while True:
        out = next((g for g in links[here][1] if g != entry), None)
        result.append(_Piece(links[here][0], entry, out))
        onward = [i for i in at[out] if i != here] if out is not None else []
        if not onward:
            return result if len(result) == len(links) else None
        here, entry = onward[0], out


def _solve_piece(
    graph: PlacementGraph,
    hardware: HardwareGraph,
    routes: Routes,
    gates: list[str],
    segment: Mapping[str, int],
    piece: _Piece,
    group: Mapping[str, int],
    homes: Mapping[int | None, str | None],
    budget_s: float,
) -> _Solved:
    """The piece's operations between gates of no length on given nodes, its segments one after the other."""
    inner = {name for name, s in segment.items() if s in piece.segments}
    around = [gates[g] for s in piece.segments for g in (s - 1, s) if 0 <= g < len(gates)]
    fixed = {gate: place for gate in around if (place := homes.get(group[gate])) is not None}
    operations = [
        graph.by_name[name] if name in inner else PlacementOperation(name=name, seconds=0.0)
        for name in graph.order
        if name in inner or name in fixed
    ]
    edges = [e for e in graph.edges if e[0] in inner | fixed.keys() and e[1] in inner | fixed.keys()]
    edges = [e for e in edges if e[0] in inner or e[1] in inner or _spans(e, gates, piece)]
    # What lies between two segments is not this piece's: the second starts when the first has ended.
    chain = [gate for s in piece.segments for gate in _edges_of(s, gates)]
    edges += [(a, b, ORDER_ONLY) for a, b in pairwise(dict.fromkeys(chain)) if a in fixed and b in fixed]
    small = PlacementGraph.model_construct(operations=tuple(operations), edges=tuple(edges))
    unlimited = HardwareGraph(
        nodes=tuple(NodeSpec(name=n) for n in hardware.names), routers=hardware.routers, links=hardware.links
    )
    if not inner and not edges:
        return _Solved(fixed, list(small.order), 0.0, 0.0)
    return _search(small, unlimited, routes, fixed, budget_s)


def _spans(edge: tuple[str, str, float], gates: list[str], piece: _Piece) -> bool:
    """Return whether an edge from gate to gate spans one of the piece's segments."""
    return edge[0] in gates and gates.index(edge[0]) + 1 in piece.segments


def _edges_of(segment: int, gates: list[str]) -> list[str]:
    return [gates[g] for g in (segment - 1, segment) if 0 <= g < len(gates)]


def _search(
    small: PlacementGraph, hardware: HardwareGraph, routes: Routes, fixed: Mapping[str, str], budget_s: float
) -> _Solved:
    """The best placement of a piece."""
    first = list_schedule(small, hardware, routes, fixed)
    assert first is not None  # there are no memory limits
    node, order = first
    _, _, seconds = timed(small, routes, node, order)
    result = solve(small, hardware, routes, seconds, budget_s, fixed=fixed)
    if result.node is not None:
        better = [event for event in result.order if isinstance(event, str)]
        _, _, exact = timed(small, routes, result.node, better)
        if exact <= seconds:
            node, order, seconds = result.node, better, exact
    bound = seconds if result.status == "optimal" and seconds - result.bound_s <= 1e-5 * seconds else result.bound_s
    return _Solved(node, order, seconds, min(bound, seconds))


def _canonical(before: str | None, end: str | None, alike: list[list[str]]) -> tuple[str | None, str | None]:
    """The same pair of nodes up to exchanging nodes that are alike."""
    if before is None:
        return None, None if end is None else next(g for g in alike if end in g)[0]
    mine = next(g for g in alike if before in g)
    if end is None or end == before:
        return mine[0], None if end is None else mine[0]
    other = next(g for g in alike if end in g)
    return mine[0], other[1] if other is mine else other[0]


def _renamed(found: _Solved, names: Mapping[str | None, str | None], nodes: tuple[str, ...]) -> _Solved:
    """A solution on other nodes that are alike."""
    full = {a: b for a, b in names.items() if a is not None and b is not None}
    back = {b: a for a, b in full.items()}
    for node in nodes:
        if node not in full:
            # The node that its own place went to, or went on to, is alike and free.
            place = node
            while place in back:
                place = back[place]
            full[node] = place
    return _Solved({name: full[n] for name, n in found.node.items()}, found.order, found.seconds, found.bound_s)
