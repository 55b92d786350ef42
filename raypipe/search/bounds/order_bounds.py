"""Lower bounds on the objectives. An order that reaches its bound is proven optimal.

Tasks of a lane may run in turn without loss (see ``problem``), which gives longer heads and tails than the dependencies
alone (see ``longest_paths``). A head is the longest path to a task's start, a tail the longest path from its end.
"""

from __future__ import annotations

import math

from raypipe.search.bounds.longest_paths import (
    Edge,
    all_edges,
    earliest_starts,
    freeing,
    longest,
    remaining_times,
    tasks_of,
)
from raypipe.search.problem import Problem, lane_order
from raypipe.simulate.lower_bound import one_machine


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
        found = []
        for c in first[d]:
            if not p.count[c]:
                continue
            from_first = earliest_starts(p, before, (p.base[c], d))
            if heads is not None and c in exact:
                from_first = [max(a, b - heads[p.base[c]]) for a, b in zip(from_first, heads, strict=True)]
            jobs = [(from_first[t], p.time[e], tails[t]) for e in p.lanes_of[d] for t in tasks_of(p, e)]
            found.append(one_machine(jobs))
        best = max(best, min(found, default=0.0))
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
    far = [-math.inf] * len(p.kind)
    far[c] = p.time[c]
    for e in lane_order(p):
        for b, lag in p.before[e]:
            far[e] = max(far[e], far[b] + lag + p.time[e])
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
