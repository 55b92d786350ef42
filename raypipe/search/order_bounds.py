"""Lower bounds on the objectives. An order that reaches its bound is proven optimal.

Tasks of a lane may run in turn without loss (see ``problem``), which gives longer heads and tails than the dependencies
alone. A head is the longest path to a task's start, a tail the longest path from its end.

``distances`` bounds how closely micro-batches can follow each other on a device that holds several of their stages.
Let a micro-batch start its last forward on the device at time T. It has then allocated an activation at each of its
earlier stages there, at the latest the length of the path from that stage's forward before T; and it frees each
activation at the earliest the length of the path from T to the freeing task after T. In any order, the micro-batch
therefore uses at least this memory profile around T, and the profiles of all micro-batches must fit into the device's
memory together. The smallest distances between their T are found by trying all packings of a few profiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from raypipe.search.problem import Problem, lane_order
from raypipe.simulate.lower_bound import one_machine

Steps = tuple[tuple[float, float], ...]
"""(distance from T, activations)."""

_STATES = 150
"""Distinct packings up to which one more profile is added; with more of them the enumeration stops."""


@lru_cache(maxsize=4096)
def distances(ups: Steps, downs: Steps, room: float, most: int) -> tuple[float, ...]:
    """Return the smallest distance between the first T and the k-th T after it, for k = 1, 2, ...

    Some packing with the smallest distance is left-justified: each profile either starts together with the one before,
    or one of its allocations waits for an earlier profile to free memory. Only such positions are tried.

    Args:
        ups: (time before T, activations allocated then at the latest).
        downs: (time after T, activations freed then at the earliest).
        room: activations that fit.
        most: number of profiles after the first.

    Returns:
        At most ``most`` distances; fewer where there are too many packings to enumerate.

    >>> distances(((0.0, 1.0),), ((10.0, 1.0),), 2.0, 4)
    (0.0, 10.0, 10.0, 20.0)
    """
    before, after = max(t for t, _ in ups), max(t for t, _ in downs)
    tiny = 1e-9 * (before + after)
    waits = sorted({up + down for up, _ in ups for down, _ in downs})
    packed: dict[tuple[int, ...], tuple[float, tuple[float, ...]]] = {(0,): (0.0, (0.0,))}
    result: list[float] = []
    for _ in range(most):
        longer: dict[tuple[int, ...], tuple[float, tuple[float, ...]]] = {}
        for last, ages in packed.values():  # ages: time since the T of each profile that may still hold memory
            places = {0.0} | {wait - age for age in ages for wait in waits if wait > age}
            for gap in places:
                others = [age + gap for age in ages]
                if not _fits(others, ups, downs, room + 1e-9, tiny):
                    continue
                alive = (0.0, *(age for age in others if age < before + after - tiny))
                key = tuple(round(age / tiny) if tiny else 0 for age in alive)
                known = longer.get(key)
                if known is None or last + gap < known[0]:
                    longer[key] = last + gap, alive
        result.append(min(at for at, _ in longer.values()))
        if len(longer) > _STATES:
            break
        packed = longer
    return tuple(result)


def _fits(others: list[float], ups: Steps, downs: Steps, room: float, tiny: float) -> bool:
    """Return whether a profile with T = 0 fits beside profiles with these ages; checked at every allocation."""
    first = -max(t for t, _ in ups)
    every = [0.0, *others]
    moments = {-up - age for age in every for up, _ in ups}
    for now in moments:
        if now < first - tiny:
            continue
        held = 0.0
        for age in every:
            at = now + age
            held += sum(n for up, n in ups if -up <= at + tiny) - sum(n for down, n in downs if down <= at + tiny)
        if held > room:
            return False
    return True


def not_implied(found: tuple[float, ...]) -> list[tuple[int, float]]:
    """Return the ``(k, distance)`` that do not already follow from sums of shorter distances."""
    implied = [0.0]
    rows: list[tuple[int, float]] = []
    for k, distance in enumerate(found, 1):
        sums = max((implied[a] + implied[k - a] for a in range(1, k)), default=0.0)
        implied.append(max(distance, sums))
        if distance > sums and distance > 0 and math.isfinite(distance):
            rows.append((k, distance))
    return rows


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
    """Add the least distances between the last forwards of a replica's micro-batches on a device; see ``distances``."""
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
    result: list[set[int]] = [set() for _ in p.kind]
    for c in reversed(lane_order(p)):
        for e, _ in p.after[c]:
            result[c] |= result[e] | {e}
    return result


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


def longest_from(p: Problem, start: int) -> list[float]:
    """Return, per lane, the longest path within a micro-batch from the start of lane ``start``'s task to its end."""
    far = [-math.inf] * len(p.kind)
    far[start] = p.time[start]
    for c in lane_order(p):
        for e, lag in p.before[c]:
            if far[e] + lag + p.time[c] > far[c]:
                far[c] = far[e] + lag + p.time[c]
    return far


def longest(p: Problem, start: int, end: int) -> float:
    """Return the same to the end of lane ``end``'s task."""
    return longest_from(p, start)[end]


def lower_bound(p: Problem) -> float:
    """Return a lower bound on the makespan of any order within the memory limit.

    The bound is the largest of three: the longest path through dependencies, lanes and memory; per device, the
    preemptive one-machine bound with heads and tails (Carlier 1982; Jackson's rule); per device, the least memory-time
    that its activations occupy, divided by its memory.
    """
    before = all_edges(p)
    heads = earliest_starts(p, before)
    tails = remaining_times(p, before)
    best = 0.0
    for d in range(p.devices):
        own = [p.base[c] + m for c in p.lanes_of[d] for m in range(p.count[c])]
        jobs = [(heads[t], p.time[p.lane[t]], tails[t]) for t in own]
        best = max(best, max((sum(j) for j in jobs), default=0.0))
        if jobs:
            best = max(best, one_machine(jobs), _memory(p, d, heads, tails))
    return best


def period_bound(p: Problem) -> float:
    """Return a lower bound on the period of any order within the memory limit.

    A device begins its next step after its last task, so every path from its first task to its last one is part of a
    cycle. The first task belongs to the first micro-batch of a stage that waits for no other stage of the device. The
    bound is the preemptive one-machine bound with heads counted from that task and tails to the device's own end.
    """
    return _device_span_bound(p, all_edges(p), None)


def span_bound(p: Problem) -> float:
    """Return a lower bound on the span of any order within the memory limit.

    It is computed as ``period_bound``. Where a device's first start is the same in every order, heads from the start of
    the step tighten it.
    """
    before = all_edges(p)
    return _device_span_bound(p, before, earliest_starts(p, before))


def _device_span_bound(p: Problem, before: list[list[Edge]], heads: list[float] | None) -> float:
    """The largest one-machine bound of a device, from its first task to its last; at least the busiest device's work.

    ``heads`` are earliest starts from the start of the step; None for a bound on the period.
    """
    first = _first_lanes(p)
    exact = _exact_starts(p, first)
    work = [math.fsum(p.time[c] * p.count[c] for c in own) for own in p.lanes_of]
    trip = [max((_round_trip(p, c) for c in lanes if p.count[c]), default=0.0) for lanes in first]
    best = max(work)
    few = max(1, _MOST_WORK // max(1, p.tasks))
    for d in sorted(range(p.devices), key=lambda d: -work[d] - trip[d])[:few]:
        tails = remaining_times(p, before, d)
        result = []
        for c in first[d]:
            if not p.count[c]:
                continue
            from_first = earliest_starts(p, before, (p.base[c], d))
            if heads is not None and c in exact:
                from_first = [max(a, b - heads[p.base[c]]) for a, b in zip(from_first, heads, strict=True)]
            jobs = [(from_first[t], p.time[e], tails[t]) for e in p.lanes_of[d] for t in tasks_of(p, e)]
            result.append(one_machine(jobs))
        best = max(best, min(result, default=0.0))
    return best


_MOST_WORK = 400_000
"""Up to this many tasks times devices, every device is bounded; beyond it, only those likely to give the largest."""


def _first_lanes(p: Problem) -> list[list[int]]:
    """Per device, the lanes that wait for no other lane of the device: one of them runs the device's first task."""
    above: list[set[int]] = [set() for _ in p.kind]
    for c in lane_order(p):
        for e, _ in p.before[c]:
            above[c] |= above[e] | {p.device[e]}
    return [[c for c in own if d not in above[c]] for d, own in enumerate(p.lanes_of)]


def _exact_starts(p: Problem, first: list[list[int]]) -> set[int]:
    """Lanes whose first task starts at its head in every order.

    Such a lane is the only one that can run first on its device, and so are all lanes that it waits for.
    """
    alone = {own[0] for own in first if len(own) == 1}
    exact: set[int] = set()
    for c in lane_order(p):
        if c in alone and all(e in exact for e, _ in p.before[c]):
            exact.add(c)
    return exact


def _round_trip(p: Problem, c: int) -> float:
    """Longest path from a lane's task to a task of the same device and micro-batch, both included."""
    far = longest_from(p, c)
    return max(far[e] for e in p.lanes_of[p.device[c]])


def _memory(p: Problem, d: int, heads: list[float], tails: list[float]) -> float:
    """A bound on the makespan from a device's memory: parallel machines with heads and tails (Carlier 1987).

    The device has as many slots as activations fit; an activation occupies a slot at least from the start of the task
    that allocates it to its last use. The slots are idle at least for the smallest heads and the smallest tails.
    """
    if p.sized or p.cap[d] == math.inf:
        return 0.0
    slots = math.floor(p.cap[d] + 1e-9)
    starts: list[float] = []
    ends: list[float] = []
    area = 0.0
    for c in p.lanes_of[d]:
        if not p.takes[c] or not p.count[c]:
            continue
        last_use = [e for e, _ in freeing(p, c, 1.0) if p.frees[e] == 1.0]
        if not last_use:
            return 0.0
        area += longest(p, c, last_use[0]) * p.count[c]
        starts += [heads[t] for t in tasks_of(p, c)]
        ends += [tails[t] for t in tasks_of(p, last_use[0])]
    if len(starts) < slots:
        return 0.0
    return (sum(sorted(starts)[:slots]) + area + sum(sorted(ends)[:slots])) / slots
