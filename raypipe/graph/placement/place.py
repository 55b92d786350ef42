"""Place an operation graph on a hardware graph so that a step is as short as possible, with a lower bound for it."""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import RunError, SpecError
from raypipe.graph.placement.cp_model import solve
from raypipe.graph.placement.list_schedule import list_schedule
from raypipe.graph.placement.placement import Event, Placement, TensorTransfer, timed
from raypipe.graph.placement.problem import HardwareGraph, PlacementGraph
from raypipe.graph.placement.routes import Route, Routes
from raypipe.graph.placement.segments import solve_by_segments

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
    found = solve(graph, hardware, routes, horizon_s, budget_s, best, contention)
    if found.status == "infeasible":
        needed = sum(op.memory_bytes for op in graph.operations)
        why = (
            "no placement keeps every node within its memory: the operations, "
            f"{needed:g} bytes in all, cannot be divided that way"
        )
        raise SpecError("memory_bytes", why, "give a node more memory, or split large operations")
    bound_s = max(bound_s, found.bound_s)
    if found.node is not None:
        starts, taken, makespan_s = timed(graph, routes, found.node, found.order, found.routes)
        if best is None or makespan_s <= best.makespan_s:
            best = Placement(found.node, starts, taken, makespan_s, bound_s)
    if best is None:
        raise RunError("raypipe place", f"found no placement within {budget_s:g} s", "give a longer --budget")
    # The solver's bound may be slightly below its own optimum, because times are rounded down.
    proven = found.status == "optimal" and best.makespan_s - bound_s <= 1e-5 * best.makespan_s
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
    longest = dict(least)
    after: dict[str, list[str]] = {name: [] for name in least}
    for source, target, _ in graph.edges:
        after[source].append(target)
    for name in reversed(graph.order):
        longest[name] = least[name] + max((longest[t] for t in after[name]), default=0.0)
    return max(max(longest.values()), sum(least.values()) / len(names))


def _serial(graph: PlacementGraph, hardware: HardwareGraph, routes: Routes) -> float:
    """Everything one after the other, with every tensor sent along the slowest of the fastest routes."""
    names = hardware.names
    work = sum(max(op.seconds_on(node) for node in names) for op in graph.operations)
    sent = sum(max(routes.seconds(a, b, size) for a in names for b in names) for _, _, size in graph.edges)
    return work + sent
