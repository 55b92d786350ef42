"""Longest paths that hold in every order: dependencies, lanes taken in turn, and room for activations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from raypipe.search.bounds.packing import distances, telling
from raypipe.search.problem import Problem, lane_order

Edge = tuple[int, int, float]
"""(lane, how many earlier in it, latency)."""


def tasks_of(p: Problem, c: int) -> range:
    """The tasks of a lane."""
    return range(p.base[c], p.base[c] + p.count[c])


def all_edges(p: Problem) -> list[list[Edge]]:
    """Per lane, what its m-th task waits for.

    Besides dependencies and its own lane, room for an activation. Say a device takes its j-th activation of the i-th of
    the stages it holds. All earlier stages' j-th are alive then, for their backwards are still to come; and of each of
    these stages all that were taken and not freed. So of an earlier stage, or this one, no more than cap + 1 - i can
    be alive besides those: the activation that many before has been freed.
    """
    edges: list[list[Edge]] = [[(e, 0, lag) for e, lag in needs] for needs in p.before]
    for c in range(len(p.kind)):
        edges[c].append((c, 1, 0.0))
    if all(cap == math.inf for cap in p.cap):
        return edges
    below = lanes_below(p)
    for d, own in enumerate(p.lanes_of):
        if p.cap[d] == math.inf:
            continue
        takers = [c for c in own if p.takes[c]]
        for c in takers:
            held = [
                e for e in takers
                if p.kind[c] == "F" == p.kind[e] and c in below[e] and all(x in below[c] for x, _ in freeing(p, e, 1.0))
            ]  # fmt: skip
            alive = len(held)
            for e in [*held, c]:
                for last, places in freeing(p, e, p.cap[d] - alive):
                    edges[c].append((last, max(1, places), 0.0))
        _space(p, d, edges)
    return edges


_FEW = 10
"""Activations up to which packings of micro-batches are tried: with more room there are too many."""


def _space(p: Problem, d: int, edges: list[list[Edge]]) -> None:
    """How far apart the last forwards are that micro-batches of one replica run on a device; see ``packing``."""
    if p.cap[d] > _FEW:
        return
    for replica in range(len(p.placement)):
        takers = [c for c in p.lanes_of[d] if p.kind[c] == "F" and p.takes[c] and p.replica[c] == replica]
        if len(takers) < 2 or p.count[takers[0]] < 2:
            continue
        last = max(takers, key=lane_order(p).index)
        ups, downs = [], []
        for c in takers:
            path = longest(p, c, last) - p.time[last]
            frees = [(longest(p, last, e), p.frees[e]) for e in freed_by(p, c)]
            if path > -math.inf and frees and all(at > -math.inf for at, _ in frees):
                ups.append((path, 1.0))
                downs += frees
        if len(ups) > 1:
            most = min(p.count[last] - 1, 2 * int(p.cap[d]) + 1)
            for k, distance in telling(distances(tuple(ups), tuple(downs), p.cap[d], most)):
                edges[last].append((last, k, distance - p.time[last]))


def lanes_below(p: Problem) -> list[set[int]]:
    """Per lane, the lanes that wait for it, however indirectly."""
    found: list[set[int]] = [set() for _ in p.kind]
    for c in reversed(lane_order(p)):
        for e, _ in p.after[c]:
            found[c] |= found[e] | {e}
    return found


def freed_by(p: Problem, taker: int) -> list[int]:
    """Lanes that end a stage's activations, or a share of them."""
    own = p.lanes_of[p.device[taker]]
    return [
        e for e in own if p.stage[e] == p.stage[taker] and p.replica[e] == p.replica[taker] and p.frees[e] > 0
    ]  # fmt: skip


def freeing(p: Problem, taker: int, room: float) -> Iterator[tuple[int, int]]:
    """Lanes that end a stage's activations, and how many of them that lane hasn't ended yet there is room for."""
    for e in freed_by(p, taker):
        if p.kind[e] == "B":  # until then an activation is whole
            yield e, math.floor(room + 1e-9)
        else:  # W or BW: until then its last share is alive, and the newest one is whole
            yield e, 1 + math.floor((room - 1) / p.frees[e] + 1e-9)


def earliest(p: Problem, before: list[list[Edge]], first: tuple[int, int] | None = None) -> list[float]:
    """Earliest start of each task on these edges, devices otherwise unlimited.

    With ``first``, a task and its device: counted from that task's start, the first of the device; minus infinity for
    what need not wait for it.
    """
    head = [0.0] * p.tasks
    base, time, count = p.base, p.time, p.count
    order = lane_order(p)
    least = [0.0] * len(p.kind)
    origin = -1
    if first is not None:
        origin, d = first
        least = [time[p.lane[origin]] if p.device[c] == d else -math.inf for c in range(len(p.kind))]
    for m in range(max(count, default=0)):
        for c in order:
            if m >= count[c]:
                continue
            start = least[c]
            for e, back, lag in before[c]:
                if m >= back:
                    ready = head[base[e] + m - back] + time[e] + lag
                    if ready > start:
                        start = ready
            head[base[c] + m] = start if base[c] + m != origin else 0.0
    return head


def rests(p: Problem, before: list[list[Edge]], device: int | None = None) -> list[float]:
    """Least time from each task's end to the end of the step; with ``device``, to the last end of that device.

    Minus infinity for what no task of that device waits for.
    """
    far = [0.0 if device is None or p.device[c] == device else -math.inf for c in range(len(p.kind))]
    tail = [far[c] for c in p.lane]
    base, time, count = p.base, p.time, p.count
    order = lane_order(p)[::-1]
    for m in reversed(range(max(count, default=0))):
        for c in order:
            if m >= count[c]:
                continue
            own = tail[base[c] + m] + time[c]
            for e, back, lag in before[c]:
                if m >= back:
                    t = base[e] + m - back
                    if own + lag > tail[t]:
                        tail[t] = own + lag
    return tail


def longest(p: Problem, start: int, end: int) -> float:
    """Longest path from the start of one lane's task to the end of another's, of one micro-batch."""
    far = [-math.inf] * len(p.kind)
    far[start] = p.time[start]
    for c in lane_order(p):
        for e, lag in p.before[c]:
            if far[e] + lag + p.time[c] > far[c]:
                far[c] = far[e] + lag + p.time[c]
    return far[end]
