"""Lower bounds on what any order can reach: never above the optimum, so that reaching one is a proof.

Lanes may be taken in turn without loss (see ``problem``); that gives heads and tails more to hold on to than the
dependencies alone (see ``paths``).
"""

from __future__ import annotations

import math

from raypipe.search.bounds.longest_paths import Edge, all_edges, earliest, freeing, longest, rests, tasks_of
from raypipe.search.problem import Problem, lane_order
from raypipe.simulate.lower_bound import one_machine


def lower_bound(p: Problem) -> float:
    """No order of these tasks within this memory ends earlier.

    The greatest of: the longest path through dependencies, lanes and memory; per device, its tasks with heads and
    tails as one preemptive machine (Carlier 1982; Jackson's rule); per device, the least memory its activations take
    up over time against what there is.
    """
    before = all_edges(p)
    heads = earliest(p, before)
    tails = rests(p, before)
    best = 0.0
    for d in range(p.devices):
        own = [p.base[c] + m for c in p.lanes_of[d] for m in range(p.count[c])]
        jobs = [(heads[t], p.time[p.lane[t]], tails[t]) for t in own]
        best = max(best, max((sum(j) for j in jobs), default=0.0))
        if jobs:
            best = max(best, one_machine(jobs), _memory(p, d, heads, tails))
    return best


def period_bound(p: Problem) -> float:
    """No order of these tasks within this memory repeats in less.

    A device begins its next step after its last task: whatever path leads from its first task to its last one is a
    cycle. Which task comes first is known (the first micro-batch of a stage that waits for no other one here), so the
    others have heads from there, and tails to the device's own end; with both it is one preemptive machine.
    """
    return _there_and_back(p, all_edges(p), None)


def span_bound(p: Problem) -> float:
    """No order of these tasks within this memory has a shorter longest device span.

    As ``period_bound``; and where a device's first start is the same in every order, heads from the start of the step
    count too.
    """
    before = all_edges(p)
    return _there_and_back(p, before, earliest(p, before))


def _there_and_back(p: Problem, before: list[list[Edge]], heads: list[float] | None) -> float:
    first = _first_lanes(p)
    exact = _exact_starts(p, first)
    work = [math.fsum(p.time[c] * p.count[c] for c in own) for own in p.lanes_of]
    trip = [max((_trip(p, c) for c in lanes if p.count[c]), default=0.0) for lanes in first]
    best = max(work)
    few = max(1, _LOOKED_AT // max(1, p.tasks))
    for d in sorted(range(p.devices), key=lambda d: -work[d] - trip[d])[:few]:
        tails = rests(p, before, d)
        found = []
        for c in first[d]:
            if not p.count[c]:
                continue
            from_first = earliest(p, before, (p.base[c], d))
            if heads is not None and c in exact:
                from_first = [max(a, b - heads[p.base[c]]) for a, b in zip(from_first, heads, strict=True)]
            jobs = [(from_first[t], p.time[e], tails[t]) for e in p.lanes_of[d] for t in tasks_of(p, e)]
            found.append(one_machine(jobs))
        best = max(best, min(found, default=0.0))
    return best


_LOOKED_AT = 400_000
"""Tasks times devices up to which every device is looked at; of a larger problem those that are likely the longest."""


def _first_lanes(p: Problem) -> list[list[int]]:
    """Per device, the lanes whose first task may be its first: those that wait for no other lane of the device."""
    above: list[set[int]] = [set() for _ in p.kind]
    for c in lane_order(p):
        for e, _ in p.before[c]:
            above[c] |= above[e] | {p.device[e]}
    return [[c for c in own if d not in above[c]] for d, own in enumerate(p.lanes_of)]


def _exact_starts(p: Problem, first: list[list[int]]) -> set[int]:
    """Lanes whose first task starts at its head in every order: alone in being first, and so is all it waits for."""
    alone = {own[0] for own in first if len(own) == 1}
    exact: set[int] = set()
    for c in lane_order(p):
        if c in alone and all(e in exact for e, _ in p.before[c]):
            exact.add(c)
    return exact


def _trip(p: Problem, c: int) -> float:
    """Longest path from a lane's task to one of the same device and micro-batch."""
    far = [-math.inf] * len(p.kind)
    far[c] = p.time[c]
    for e in lane_order(p):
        for b, lag in p.before[e]:
            far[e] = max(far[e], far[b] + lag + p.time[e])
    return max(far[e] for e in p.lanes_of[p.device[c]])


def _memory(p: Problem, d: int, heads: list[float], tails: list[float]) -> float:
    """As many places as the cap, each of which holds one activation at a time, at least from its taker's start to its
    last use: parallel machines with heads and tails (Carlier 1987). No place is used before the first heads nor after
    the last tails, as many of each as there are places.
    """
    if p.cap[d] == math.inf:
        return 0.0
    places = math.floor(p.cap[d] + 1e-9)
    starts: list[float] = []
    ends: list[float] = []
    area = 0.0
    for c in p.lanes_of[d]:
        if not p.takes[c] or not p.count[c]:
            continue
        whole = [e for e, _ in freeing(p, c, 1.0) if p.frees[e] == 1.0]
        if not whole:
            return 0.0
        area += longest(p, c, whole[0]) * p.count[c]
        starts += [heads[t] for t in tasks_of(p, c)]
        ends += [tails[t] for t in tasks_of(p, whole[0])]
    if len(starts) < places:
        return 0.0
    return (sum(sorted(starts)[:places]) + area + sum(sorted(ends)[:places])) / places
