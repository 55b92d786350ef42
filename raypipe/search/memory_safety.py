"""Deadlock avoidance: Dijkstra's banker's algorithm decides whether all micro-batches in flight can still finish.

On a device with several stages, forwards of one stage may fill the memory that another stage needs before anything is
freed. Micro-batches are the processes of the algorithm and activations the resource: a micro-batch in flight claims
one activation at every stage that it has not reached, and frees all of them when it ends.
"""

from __future__ import annotations

from raypipe.schedule.ir import backwards
from raypipe.search.problem import Problem


class Safety:
    """What the micro-batches of one problem hold and still claim, derived from how far each lane has run."""

    def __init__(self, p: Problem) -> None:
        self.devices, self.cap, self.replicas = p.devices, p.cap, len(p.placement)
        last = [backward.last for backward in backwards(p.graph, p.rules)]
        self.firsts: list[list[int]] = [[] for _ in p.placement]
        """Per replica, the lanes that begin a stage (F)."""
        self.lasts: list[list[int]] = [[] for _ in p.placement]
        """Per replica, the lanes that end a stage: W or BW, and B or F where it is frozen."""
        self.claims: list[list[tuple[int, int, float, bool]]] = [[] for _ in p.placement]
        """Per replica: device, allocating lane, activations allocated, and whether they are there for one task only: R,
        or F of a stage without a backward."""
        self.frees: list[list[tuple[int, int, float]]] = [[] for _ in p.placement]
        """Per replica: device, freeing lane, activations freed."""
        for c, replica in enumerate(p.replica):
            if p.kind[c] == "F":
                self.firsts[replica].append(c)
            if p.kind[c] in last[p.stage[c]]:
                self.lasts[replica].append(c)
            if p.takes[c]:
                self.claims[replica].append((p.device[c], c, p.takes[c], p.kind[c] == "R" or p.frees[c] > 0))
            if p.frees[c]:
                self.frees[replica].append((p.device[c], c, p.frees[c]))

    def safe(self, done: list[int], live: list[float]) -> bool:
        """Return whether some order lets every micro-batch in flight finish within memory.

        Args:
            done: per lane, tasks that were started.
            live: per device, live activations.
        """
        left = [cap - used + 1e-9 for cap, used in zip(self.cap, live, strict=True)]
        in_flight = [
            list(range(min(done[c] for c in lasts), max(done[c] for c in firsts)))
            for firsts, lasts in zip(self.firsts, self.lasts, strict=True)
        ]
        stuck = 0
        r = 0
        place = [0] * self.replicas
        while stuck < self.replicas:
            m = in_flight[r][place[r]] if place[r] < len(in_flight[r]) else -1
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
        return all(k == len(row) for k, row in zip(place, in_flight, strict=True))

    def _fits(self, r: int, m: int, done: list[int], left: list[float]) -> bool:
        """Whether the remaining claims of micro-batch ``m`` of replica ``r`` fit; it recomputes one stage at a time."""
        need: dict[int, float] = {}
        brief: dict[int, float] = {}
        for d, c, amount, briefly in self.claims[r]:
            if m >= done[c]:
                if briefly:
                    brief[d] = max(brief.get(d, 0.0), amount)
                else:
                    need[d] = need.get(d, 0.0) + amount
        return all(need.get(d, 0.0) + brief.get(d, 0.0) <= left[d] for d in {*need, *brief})
