"""Routes through the hardware graph: the fastest one for a tensor of some size, and all routes without cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from raypipe.graph.placement.problem import HardwareGraph, LinkSpec


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
        self._hops: dict[str, list[Hop]] = {name: [] for name in (*hardware.names, *hardware.routers)}
        for n, (a, b, _) in enumerate(hardware.links):
            self._hops[a].append(Hop(n, a, b))
            self._hops[b].append(Hop(n, b, a))
        self.fastest = cache(self._fastest)
        self.seconds = cache(self._seconds)

    def _fastest(self, source: str, target: str, size: float) -> Route:
        """The route that takes a tensor of ``size`` bytes there first (Dijkstra); empty if the nodes are the same."""
        if size == ORDER_ONLY:
            size = 0.0  # any route will do
        best = {source: 0.0}
        towards: dict[str, Hop] = {}
        queue = [(0.0, source)]
        while queue:
            spent, place = heapq.heappop(queue)
            if place == target:
                break
            if spent > best[place]:
                continue
            for hop in self._hops[place]:
                arrival = spent + self.links[hop.link].seconds(size)
                if arrival < best.get(hop.target, float("inf")):
                    best[hop.target], towards[hop.target] = arrival, hop
                    heapq.heappush(queue, (arrival, hop.target))
        route: list[Hop] = []
        place = target
        while place != source:
            route.append(towards[place])
            place = towards[place].source
        return tuple(reversed(route))

    def _seconds(self, source: str, target: str, size: float) -> float:
        """How long the fastest route takes: the sum over its links."""
        if size == ORDER_ONLY:
            return 0.0
        return sum(self.links[hop.link].seconds(size) for hop in self.fastest(source, target, size))

    def simple(self, source: str, target: str) -> Iterator[Route]:
        """Yield all routes that visit no node or router twice."""
        path: list[Hop] = []

        def extend(place: str, visited: frozenset[str]) -> Iterator[Route]:
            if place == target:
                yield tuple(path)
                return
            for hop in self._hops[place]:
                if hop.target not in visited:
                    path.append(hop)
                    yield from extend(hop.target, visited | {hop.target})
                    path.pop()

        yield from extend(source, frozenset({source}))


def places(route: Route) -> list[str]:
    """Return the nodes and routers that a route visits, including its ends."""
    return [route[0].source, *(hop.target for hop in route)]
