"""Can the micro-batches under way all come to their end in the memory there is? Dijkstra's banker's algorithm.

On a device that holds several stages, forwards of one may fill the memory that another one needs before anything is
freed. Micro-batches are the processes here, activations the resource: a micro-batch that is under way will claim an
activation at every stage it has not reached, and gives back all it holds when it ends.
"""

from __future__ import annotations

from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.search.problem import Problem


class Safety:
    """Claims and holdings of one problem's micro-batches, read off how far each lane is."""

    def __init__(self, p: Problem) -> None:
        self.devices, self.cap, self.replicas = p.devices, p.cap, len(p.placement)
        self.firsts: list[list[int]] = [[] for _ in p.placement]
        """Per replica, the lanes that begin a stage, and ..."""
        self.lasts: list[list[int]] = [[] for _ in p.placement]
        """... those that end it."""
        self.claims: list[list[tuple[int, int, float, bool]]] = [[] for _ in p.placement]
        """Per replica: device, lane that takes, how much, and whether by a recomputation."""
        self.frees: list[list[tuple[int, int, float]]] = [[] for _ in p.placement]
        for c, replica in enumerate(p.replica):
            if p.kind[c] == "F":
                self.firsts[replica].append(c)
            if p.kind[c] in WEIGHT_GRADIENTS:
                self.lasts[replica].append(c)
            if p.takes[c]:
                self.claims[replica].append((p.device[c], c, p.takes[c], p.kind[c] == "R"))
            if p.frees[c]:
                self.frees[replica].append((p.device[c], c, p.frees[c]))

    def safe(self, done: list[int], live: list[float]) -> bool:
        """Is there an order in which all that is under way can end?

        Args:
            done: per lane, tasks that were started.
            live: per device, activations held.
        """
        left = [cap - held + 1e-9 for cap, held in zip(self.cap, live, strict=True)]
        under_way = [
            list(range(min(done[c] for c in lasts), max(done[c] for c in firsts)))
            for firsts, lasts in zip(self.firsts, self.lasts, strict=True)
        ]
        stuck = 0
        r = 0
        place = [0] * self.replicas
        while stuck < self.replicas:
            m = under_way[r][place[r]] if place[r] < len(under_way[r]) else -1
            if m >= 0 and self._fits(r, m, done, left):
                for d, c, amount, _ in self.claims[r]:
                    if m < done[c]:
                        left[d] += amount
                for d, c, amount in self.frees[r]:
                    if m < done[c]:
                        left[d] -= amount
                place[r] += 1
                stuck = 0
            else:
                stuck += 1
                r = (r + 1) % self.replicas
        return all(k == len(row) for k, row in zip(place, under_way, strict=True))

    def _fits(self, r: int, m: int, done: list[int], left: list[float]) -> bool:
        """May micro-batch ``m`` of replica ``r`` take what it still claims? It rebuilds one stage at a time."""
        need: dict[int, float] = {}
        again: dict[int, float] = {}
        for d, c, amount, rebuilt in self.claims[r]:
            if m >= done[c]:
                if rebuilt:
                    again[d] = amount
                else:
                    need[d] = need.get(d, 0.0) + amount
        return all(need.get(d, 0.0) + again.get(d, 0.0) <= left[d] for d in {*need, *again})
