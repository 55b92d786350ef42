"""Longest paths that hold in every order, over three kinds of edges: dependencies, lanes in turn, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from raypipe.search.bounds.packing import distances, not_implied
from raypipe.search.problem import Problem, lane_order

Edge = tuple[int, int, float]
"""``(lane, k, latency)``: the task waits for the task of ``lane`` whose micro-batch is k earlier."""


def tasks_of(p: Problem, c: int) -> range:
    """Return the tasks of a lane."""
    return range(p.base[c], p.base[c] + p.count[c])


def all_edges(p: Problem) -> list[list[Edge]]:
    """Return, per lane, what its tasks wait for: dependencies, the task before in the lane, and free memory.

    The memory edges: when a device allocates the j-th activation of the i-th stage it holds, the j-th activations of
    all its earlier stages are alive, because their backwards come later. Of an earlier stage, or of this one, at most
    cap + 1 - i activations can then be alive, so the activation that many micro-batches earlier has been freed.
    """
    edges: list[list[Edge]] = [[(e, 0, lag) for e, lag in needs] for needs in p.before]
    for c in range(len(p.kind)):
        edges[c].append((c, 1, 0.0))
    if p.sized or all(cap == math.inf for cap in p.cap):
        return edges
    below = lanes_below(p)
    for d, own in enumerate(p.lanes_of):
        if p.cap[d] == math.inf:
            continue
        takers = [c for c in own if p.takes[c]]
        for c in takers:
            earlier = [
                e
                for e in takers
                if p.kind[c] == "F" == p.kind[e] and c in below[e] and all(x in below[c] for x, _ in freeing(p, e, 1.0))
            ]
            alive = len(earlier)
            for e in [*earlier, c]:
                for last, places in freeing(p, e, p.cap[d] - alive):
                    edges[c].append((last, max(1, places), 0.0))
        _add_packing_edges(p, d, edges)
    return edges


_MOST_PACKED = 10
"""Up to this many activations of memory, packings of micro-batches are enumerated; with more there are too many."""


def _add_packing_edges(p: Problem, d: int, edges: list[list[Edge]]) -> None:
    """Add the least distances between the last forwards of a replica's micro-batches on a device; see ``packing``."""
    if p.cap[d] > _MOST_PACKED:
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
            for k, distance in not_implied(distances(tuple(ups), tuple(downs), p.cap[d], most)):
                edges[last].append((last, k, distance - p.time[last]))


def lanes_below(p: Problem) -> list[set[int]]:
    """Return, per lane, the lanes that wait for it directly or indirectly."""
    found: list[set[int]] = [set() for _ in p.kind]
    for c in reversed(lane_order(p)):
        for e, _ in p.after[c]:
            found[c] |= found[e] | {e}
    return found


def freed_by(p: Problem, taker: int) -> list[int]:
    """Return the lanes that free the activations, or a share of them, that lane ``taker`` allocates."""
    own = p.lanes_of[p.device[taker]]
    return [e for e in own if p.stage[e] == p.stage[taker] and p.replica[e] == p.replica[taker] and p.frees[e] > 0]


def freeing(p: Problem, taker: int, room: float) -> Iterator[tuple[int, int]]:
    """Yield each lane that frees a stage's activations, and how many activations not yet freed by it fit ``room``."""
    for e in freed_by(p, taker):
        if p.kind[e] == "B":  # before its B, the whole activation is alive
            yield e, math.floor(room + 1e-9)
        else:  # before its W or BW, at least the share that this frees is alive; the newest activation is whole
            yield e, 1 + math.floor((room - 1) / p.frees[e] + 1e-9)


def earliest_starts(
    p: Problem, before: list[list[Edge]], first: tuple[int, int] | None = None, known: Sequence[float] = ()
) -> list[float]:
    """Return the earliest start of each task under these edges, ignoring that a device runs one task at a time.

    With ``first``, a device's first task and that device, starts are counted from the start of that task; tasks that
    do not wait for it have minus infinity. With ``known``, a time per task, no task starts before that.
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
            start = max(least[c], known[base[c] + m]) if known else least[c]
            for e, back, lag in before[c]:
                if m >= back:
                    ready = head[base[e] + m - back] + time[e] + lag
                    if ready > start:
                        start = ready
            head[base[c] + m] = start if base[c] + m != origin else 0.0
    return head


def remaining_times(
    p: Problem, before: list[list[Edge]], device: int | None = None, known: Sequence[float] = ()
) -> list[float]:
    """Return the least time from each task's end to the end of the step; with ``device``, to that device's last end.

    Tasks that no task of that device waits for have minus infinity. ``known``: times per task that are surely left.
    """
    far = [0.0 if device is None or p.device[c] == device else -math.inf for c in range(len(p.kind))]
    tail = list(known) if known else [far[c] for c in p.lane]
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
    """Return the longest path within a micro-batch, from the start of lane ``start``'s task to the end of ``end``'s."""
    far = [-math.inf] * len(p.kind)
    far[start] = p.time[start]
    for c in lane_order(p):
        for e, lag in p.before[c]:
            if far[e] + lag + p.time[c] > far[c]:
                far[c] = far[e] + lag + p.time[c]
    return far[end]
