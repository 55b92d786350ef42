"""The placement problem as a constraint program for OR-tools' CP-SAT, with a bound that holds for the exact times.

Times are expressed in integer ticks. If all of them are multiples of one unit that is not too small, a tick is that
unit and nothing is rounded. Otherwise they are rounded down, so the optimum of the rounded problem is a lower bound for
the exact one, and the order of work that it finds is then timed exactly (``placement.timed``).

Source: Pal et al. 2019, section 6, Equations 7 to 13; symmetry breaking, redundant bounds and contention are ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise, permutations
from math import ceil, gcd
from typing import Any

from ortools.sat.python import cp_model

from raypipe.graph.placement.problem import (
    Event,
    HardwareGraph,
    Placement,
    PlacementGraph,
    Route,
    Routes,
    TensorTransfer,
)

TICKS = 1 << 26
"""Number of ticks in the longest makespan searched, if times are rounded."""
MOST_TICKS = 1 << 36
"""Largest number of ticks in the longest makespan searched, if times are not rounded."""
MOST_ROUTES = 4
"""With contention, the number of routes tried between two nodes, the shortest first."""


@dataclass
class Solution:
    """The solver's result; ``node`` is None if it found no placement."""

    status: str
    """``optimal``, ``feasible``, ``infeasible`` or ``unknown``."""
    bound_s: float
    node: dict[str, str] | None = None
    order: list[Event] = field(default_factory=list)
    routes: dict[int, Route] | None = None
    """With contention, the route of each edge that crosses nodes."""


def solve(
    graph: PlacementGraph,
    hardware: HardwareGraph,
    routes: Routes,
    horizon_s: float,
    budget_s: float,
    hint: Placement | None = None,
    contention: bool = False,
    fixed: Mapping[str, str] | None = None,
) -> Solution:
    """Search for the placement and the order with the smallest makespan.

    Args:
        graph, hardware, routes: the problem.
        horizon_s: some placement takes no longer than this.
        budget_s: when to stop; the best so far and the bound are returned.
        hint: where to start.
        contention: links carry one tensor at a time in each direction.
        fixed: nodes of some operations.
    """
    program = _PlacementProgram(graph, hardware, routes, horizon_s, contention, fixed or {})
    if hint is not None:
        program.add_hint(hint)
    return program.run(budget_s)


class _PlacementProgram:
    def __init__(
        self,
        graph: PlacementGraph,
        hardware: HardwareGraph,
        routes: Routes,
        horizon_s: float,
        contention: bool,
        fixed: Mapping[str, str],
    ) -> None:
        self.graph, self.hardware, self.routes = graph, hardware, routes
        self.model: Any = cp_model.CpModel()
        self.names = hardware.names
        self.tick_s, self.exact = _tick(self._times(contention), horizon_s)
        self.size = {
            op.name: {node: self._ticks(op.seconds_on(node)) for node in self.names} for op in graph.operations
        }
        self.horizon = int(horizon_s / self.tick_s * (1 + 1e-9)) + 1
        self.on: dict[str, dict[str, Any]] = {}
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}
        self.makespan = self.model.new_int_var(0, self.horizon, "makespan")
        self.hops: dict[tuple[int, int, str], Any] = {}  # start of a transfer: edge, link, its source
        self.taken: dict[int, list[tuple[Any, Route]]] = {}
        self.complete = True
        self._place()
        self._bound_by_paths()
        self._limit_memory()
        for name, node in fixed.items():
            self.model.add(self.on[name][node] == 1)
        self._break_symmetry(frozenset(fixed.values()))
        for number in range(len(graph.edges)):
            self._connect(number)
        if contention:
            self._share_links()
        self.model.minimize(self.makespan)

    def _times(self, contention: bool) -> set[float]:
        """Return all durations in the problem, in seconds."""
        times = {op.seconds_on(node) for op in self.graph.operations for node in self.names}
        for size in {size for _, _, size in self.graph.edges}:
            if contention:
                for link in self.routes.links:
                    times |= {link.seconds(size), size / (link.bandwidth_gb_s * 1e9)}
            else:
                times |= {self.routes.seconds(a, b, size) for a, b in permutations(self.names, 2)}
        return times

    def _ticks(self, seconds: float) -> int:
        return round(seconds / self.tick_s) if self.exact else int(seconds / self.tick_s)

    def _place(self) -> None:
        """Every operation on one node, and no two on one node at the same time."""
        for together in self.graph.together:
            row = {node: self.model.new_bool_var(f"{together[0]} on {node}") for node in self.names}
            self.model.add_exactly_one(row.values())
            self.on.update(dict.fromkeys(together, row))
        intervals: dict[str, list[Any]] = {name: [] for name in self.names}
        for name, sizes in self.size.items():
            self.start[name] = self.model.new_int_var(0, self.horizon, f"start {name}")
            length = (
                sum(self.on[name][node] * size for node, size in sizes.items())
                if len(set(sizes.values())) > 1
                else next(iter(sizes.values()))
            )
            self.end[name] = self.start[name] + length
            self.model.add(self.makespan >= self.end[name])
            for node, size in sizes.items():
                intervals[node].append(
                    self.model.new_optional_fixed_size_interval_var(
                        self.start[name], size, self.on[name][node], f"{name} runs on {node}"
                    )
                )
        for node, rows in intervals.items():
            self.model.add_no_overlap(rows)
            # This constraint is implied, but the lower bound depends on it where the graph is wide.
            self.model.add(self.makespan >= sum(self.on[name][node] * self.size[name][node] for name in self.size))

    def _bound_by_paths(self) -> None:
        """Bound every start by the shortest times of the operation's predecessors and successors."""
        least = {name: min(sizes.values()) for name, sizes in self.size.items()}
        head = dict.fromkeys(least, 0)
        position = {name: i for i, name in enumerate(self.graph.order)}
        for source, target, _ in sorted(self.graph.edges, key=lambda edge: position[edge[0]]):
            head[target] = max(head[target], head[source] + least[source])
        tail = self.graph.longest_paths(least)
        for name in least:
            self.model.add(self.start[name] >= head[name])
            self.model.add(self.makespan >= self.start[name] + tail[name])

    def _limit_memory(self) -> None:
        for node in self.hardware.nodes:
            if node.memory_bytes is not None:
                needs = [
                    (self.on[names[0]][node.name], ceil(self.graph.memory_of(names))) for names in self.graph.together
                ]
                self.model.add(sum(var * need for var, need in needs if need) <= int(node.memory_bytes))

    def _break_symmetry(self, fixed: frozenset[str]) -> None:
        """Of nodes that can be exchanged, the first is used by the first operation that uses any of them."""
        first = {name: names[0] for names in self.graph.together for name in names}
        for group in exchangeable(self.graph, self.hardware, self.routes):
            for earlier, later in pairwise([node for node in group if node not in fixed]):
                opened = None
                for name in dict.fromkeys(first[name] for name in self.graph.order):
                    # ``later`` may hold an operation only if ``earlier`` holds one before it.
                    if opened is None:
                        self.model.add(self.on[name][later] == 0)
                    else:
                        self.model.add(self.on[name][later] <= opened)
                    now = self.model.new_bool_var("")
                    before = self.on[name][earlier] if opened is None else opened + self.on[name][earlier]
                    self.model.add(now <= before)
                    opened = now

    def _connect(self, number: int) -> None:
        """Start an operation only after its inputs have arrived, by the fastest routes if links are never busy."""
        source, target, size = self.graph.edges[number]
        start, end = self.start[target], self.end[source]
        if self.on[source] is self.on[target]:
            self.model.add(start >= end)
            return
        delays = {(a, b): self._ticks(self.routes.seconds(a, b, size)) for a, b in permutations(self.names, 2)}
        self.model.add(start >= end)
        if not any(delays.values()):
            return
        crosses = self.model.new_bool_var(f"edge {number} crosses")
        for node in self.names:
            self.model.add(crosses >= self.on[source][node] - self.on[target][node])
        self.model.add(start >= end + min(delays.values()) * crosses)
        if len(set(delays.values())) > 1:
            for (a, b), delay in delays.items():
                if delay > min(delays.values()):
                    self.model.add(start >= end + delay).only_enforce_if(self.on[source][a], self.on[target][b])

    def _share_links(self) -> None:
        """Model contention: each edge takes one route, link by link, and a link carries one tensor at a time."""
        candidates: dict[tuple[str, str], list[Route]] = {}
        for pair in permutations(self.names, 2):
            result = sorted(self.routes.simple(*pair), key=len)
            self.complete &= len(result) <= MOST_ROUTES
            candidates[pair] = result[:MOST_ROUTES]
        busy: dict[tuple[int, str], list[Any]] = {}
        for number, (source, target, size) in enumerate(self.graph.edges):
            if self.on[source] is self.on[target]:
                continue
            used: dict[tuple[int, str], list[Any]] = {}
            rows: list[tuple[Any, Route]] = []
            for (a, b), options in candidates.items():
                literals = []
                for route in options:
                    literal = self.model.new_bool_var("")
                    literals.append(literal)
                    rows.append((literal, route))
                    self.model.add_implication(literal, self.on[source][a])
                    self.model.add_implication(literal, self.on[target][b])
                    for hop in route:
                        used.setdefault((hop.link, hop.source), []).append(literal)
                self.model.add_bool_or([*literals, ~self.on[source][a], ~self.on[target][b]])
            self.model.add_at_most_one(literal for literal, _ in rows)
            self.taken[number] = rows
            for (link, place), literals in used.items():
                begin = self.hops[(number, link, place)] = self.model.new_int_var(0, self.horizon, "")
                present = self.model.new_bool_var("")
                self.model.add_max_equality(present, literals)
                length = self._ticks(size / (self.routes.links[link].bandwidth_gb_s * 1e9))
                interval = self.model.new_optional_fixed_size_interval_var(begin, length, present, "")
                busy.setdefault((link, place), []).append(interval)
            for literal, route in rows:
                reached: Any = self.end[source]
                for hop in route:
                    begin = self.hops[(number, hop.link, hop.source)]
                    self.model.add(begin >= reached).only_enforce_if(literal)
                    reached = begin + self._ticks(self.routes.links[hop.link].seconds(size))
                self.model.add(self.start[target] >= reached).only_enforce_if(literal)
        for intervals in busy.values():
            self.model.add_no_overlap(intervals)

    def add_hint(self, hint: Placement) -> None:
        """Start from a known placement."""
        for name in hint.node:
            self.model.add_hint(self.start[name], self._ticks(hint.start_s[name]))
        for names in self.graph.together:
            for other in self.names:
                self.model.add_hint(self.on[names[0]][other], hint.node[names[0]] == other)

    def run(self, budget_s: float) -> Solution:
        solver: Any = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = budget_s
        solver.parameters.num_workers = max(4, os.cpu_count() or 1)
        solver.parameters.random_seed = 0
        status = solver.solve(self.model)
        bound_s = max(0.0, solver.best_objective_bound) * self.tick_s
        names = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
        result = Solution(names.get(status, "unknown"), bound_s)
        if result.status not in ("optimal", "feasible"):
            return result
        if not self.complete:
            result.bound_s = 0.0  # a route that was not tried may be better
        result.node = {
            name: next(node for node, var in row.items() if solver.boolean_value(var)) for name, row in self.on.items()
        }
        position = {name: i for i, name in enumerate(self.graph.order)}
        events: list[tuple[tuple[int, int, int], Event]] = [
            ((solver.value(self.start[name]), position[name], -1), name) for name in self.on
        ]
        if self.taken:
            result.routes = {}
            for number, rows in self.taken.items():
                for literal, route in rows:
                    if solver.boolean_value(literal):
                        result.routes[number] = route
                        # A transfer of zero ticks starts when its producer ends, and must come after it in the order.
                        after = position[self.graph.edges[number][0]]
                        events += [
                            (
                                (solver.value(self.hops[(number, hop.link, hop.source)]), after, h),
                                TensorTransfer(number, h),
                            )
                            for h, hop in enumerate(route)
                        ]
        result.order = [event for _, event in sorted(events, key=lambda each: each[0])]
        return result


def exchangeable(graph: PlacementGraph, hardware: HardwareGraph, routes: Routes) -> list[list[str]]:
    """Groups of nodes with the same memory, times and links to everything."""
    sizes = {size for _, _, size in graph.edges}
    memory = {node.name: node.memory_bytes for node in hardware.nodes}
    by_node = [op.seconds for op in graph.operations if isinstance(op.seconds, dict)]

    def same(a: str, b: str) -> bool:
        if memory[a] != memory[b] or any(seconds[a] != seconds[b] for seconds in by_node):
            return False
        swap = {a: b, b: a}
        return all(
            routes.seconds(x, y, size) == routes.seconds(swap.get(x, x), swap.get(y, y), size)
            for x, y in permutations(hardware.names, 2)
            for size in sizes
        )

    groups: list[list[str]] = []
    for name in hardware.names:
        home = next((g for g in groups if all(same(other, name) for other in g)), None)
        if home is None:
            groups.append([name])
        else:
            home.append(name)
    return groups


def _tick(times: set[float], horizon_s: float) -> tuple[float, bool]:
    """Return the length of a tick in seconds, and whether all times are multiples of it."""
    unit = Fraction(0)
    for seconds in times:
        # Floating-point sums and quotients differ from the intended decimal only in the last digits.
        value = Fraction(f"{seconds:.12g}")
        unit = Fraction(
            gcd(unit.numerator * value.denominator, value.numerator * unit.denominator),
            unit.denominator * value.denominator,
        )
    if unit and horizon_s / unit <= MOST_TICKS:
        return float(unit), True
    return horizon_s / TICKS or 1.0, False
