"""Lower bounds on the makespan of any order: never above the optimum, so that reaching one is a proof.

Lanes may be taken in turn without loss (see ``problem``); that gives heads and tails more to hold on to than the
dependencies alone: tasks of a lane follow one another, and where one stage has a device's memory to itself, its m-th
forward waits for the weight gradient that frees the place.
"""

from __future__ import annotations

import math

from raypipe.auto.problem import Problem
from raypipe.simulate.bounds import one_machine

Edge = tuple[int, int, float]
"""(lane, how many earlier in it, latency)."""


def lower_bound(p: Problem) -> float:
    """No order of these tasks within this memory ends earlier.

    The greatest of: the longest path through dependencies, lanes and memory; per device, its tasks with heads and
    tails as one preemptive machine (Carlier 1982; Jackson's rule); per device, the least memory its activations take
    up over time against what there is.
    """
    before = _edges(p)
    heads = _heads(p, before)
    tails = _tails(p, before)
    best = 0.0
    for d in range(p.devices):
        own = [p.base[c] + m for c in p.lanes_of[d] for m in range(p.count[c])]
        jobs = [(heads[t], p.time[p.lane[t]], tails[t]) for t in own]
        best = max(best, max((sum(j) for j in jobs), default=0.0))
        if jobs:
            best = max(best, one_machine(jobs), _memory(p, d, heads, tails))
    return best


def busiest(p: Problem) -> float:
    """The work of the busiest device: a bound on span and period."""
    return max(math.fsum(p.time[c] * p.count[c] for c in own) for own in p.lanes_of)


def _edges(p: Problem) -> list[list[Edge]]:
    """Per lane, what its m-th task waits for."""
    edges: list[list[Edge]] = [[(e, 0, lag) for e, lag in needs] for needs in p.before]
    for c in range(len(p.kind)):
        edges[c].append((c, 1, 0.0))
    for d, own in enumerate(p.lanes_of):
        takers = [c for c in own if p.takes[c]]
        if p.cap[d] == math.inf:
            continue
        for c in takers:
            # Other stages of the device hold at least nothing, so each alone keeps within the cap.
            places = math.floor(p.cap[d] + 1e-9)
            last = [e for e in own if p.stage[e] == p.stage[c] and p.replica[e] == p.replica[c] and p.frees[e] > 0]
            full = [e for e in last if p.kind[e] in ("W", "BW") and p.frees[e] == 1.0]
            if full:
                edges[c].append((full[0], places, 0.0))
    return edges


def _heads(p: Problem, before: list[list[Edge]]) -> list[float]:
    """Earliest start of each task on these edges, devices otherwise unlimited."""
    head = [0.0] * p.tasks
    base, time, count = p.base, p.time, p.count
    order = _lane_order(p)
    for m in range(max(count, default=0)):
        for c in order:
            if m >= count[c]:
                continue
            start = 0.0
            for e, back, lag in before[c]:
                if m >= back:
                    ready = head[base[e] + m - back] + time[e] + lag
                    if ready > start:
                        start = ready
            head[base[c] + m] = start
    return head


def _tails(p: Problem, before: list[list[Edge]]) -> list[float]:
    """Least time from each task's end to the end of the step."""
    tail = [0.0] * p.tasks
    base, time, count = p.base, p.time, p.count
    for m in reversed(range(max(count, default=0))):
        for c in reversed(_lane_order(p)):
            if m >= count[c]:
                continue
            own = tail[base[c] + m] + time[c]
            for e, back, lag in before[c]:
                if m >= back:
                    t = base[e] + m - back
                    if own + lag > tail[t]:
                        tail[t] = own + lag
    return tail


def _lane_order(p: Problem) -> list[int]:
    """Lanes, each after those it depends on."""
    waits = [len(b) for b in p.before]
    ready = [c for c, k in enumerate(waits) if not k]
    for c in ready:
        for e, _ in p.after[c]:
            waits[e] -= 1
            if not waits[e]:
                ready.append(e)
    return ready


def _memory(p: Problem, d: int, heads: list[float], tails: list[float]) -> float:
    """Each activation lives at least from its taker's start to its last use; the cap limits how many do at once.

    Sum over activations of the shortest life <= cap * (time from the first to the last moment any of them can live),
    and what is outside that window comes on top.
    """
    cap = p.cap[d]
    if cap == math.inf:
        return 0.0
    area, first, rest = 0.0, math.inf, math.inf
    for c in p.lanes_of[d]:
        if not p.takes[c] or not p.count[c]:
            continue
        last = [
            e for e in p.lanes_of[d]
            if p.stage[e] == p.stage[c] and p.replica[e] == p.replica[c] and p.kind[e] in ("W", "BW")
        ]  # fmt: skip
        if p.frees[last[0]] != 1.0:
            return 0.0
        life = _path(p, c, last[0])
        area += life * p.count[c]
        first = min(first, heads[p.base[c]])
        rest = min(rest, tails[p.base[last[0]] + p.count[c] - 1])
    return first + area / cap + rest if area else 0.0


def _path(p: Problem, start: int, end: int) -> float:
    """Longest path from the start of one lane's task to the end of another's, of one micro-batch."""
    far = [-math.inf] * len(p.kind)
    far[start] = p.time[start]
    for c in _lane_order(p):
        for e, lag in p.before[c]:
            if far[e] + lag + p.time[c] > far[c]:
                far[c] = far[e] + lag + p.time[c]
    return far[end]
