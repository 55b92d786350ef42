"""A bound on the makespan from one device at a time: every order of its own tasks, the others as fast as they like.

What the device asks of the others is only time: a micro-batch that leaves it comes back no sooner than the longest path
through the stages elsewhere allows. Its own tasks run one at a time, within its memory. That is where little memory
costs most: few micro-batches are under way at once, and what they wait for each other is in no longest path. All orders
are tried at once (``least_starts``), from the front for earliest starts and from the back for the least times left;
both tighten those of the other devices, until nothing moves.

A state is what a beginning of an order leaves behind: how many tasks of each lane have run, when the device is free,
when each task ended that another one of the device still waits for, and the least makespan that follows from tails. Of
two states with as many tasks of each lane, one that is no later in anything makes the other superfluous. Where more
states are left than a list holds, the two closest become one that has the earlier time of both in everything: it stands
for no order, but is followed by nothing later than what follows either. So the least makespan of the last states is a
lower bound, and the optimum of the one device if no two were joined. (A relaxed decision diagram: Bergman, Cire, van
Hoeve, Hooker 2016, chapter 4.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.machine_code import compiled
from raypipe.search.order_bounds import all_edges, earliest_starts, longest, remaining_times, tasks_of
from raypipe.search.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled
def least_starts(
    count: Ints,
    time: Floats,
    head: Floats,
    tail: Floats,
    arc_first: Ints,
    arc_from: Ints,
    arc_lag: Floats,
    user_first: Ints,
    user: Ints,
    live: float,
    delta: Floats,
    take: Floats,
    room: float,
    known: float,
    width: int,
    most: int,
    pending: int,
    starts: Floats,
) -> tuple[float, int]:
    """Return a lower bound on the makespan, and how many states were made; the bound is -1 if they were too many.

    Args:
        count: tasks of each of the device's C lanes.
        time: of one task of each lane.
        head: (C, N): earliest start of each task.
        tail: (C, N): least time from its end to the end of the step.
        arc_first: (C + 1,): where each lane's arcs begin in ``arc_from`` and ``arc_lag``.
        arc_from: the lane whose task of the same micro-batch has to end a lag before.
        arc_lag: that lag.
        user_first: (C + 1,): where each lane's users begin in ``user``.
        user: the lanes that have an arc from this one.
        live: what the memory holds before the first task.
        delta: what each lane's task leaves there.
        take: what each lane's task needs on top when it starts.
        room: what the memory holds at most.
        known: a makespan that is known to be possible; only shorter orders are looked for.
        width: states of one list.
        most: states of all lists together; beyond it, there is no bound.
        pending: ends that a state can hold; beyond it, there is no bound.
        starts: (C, N), written to: the earliest start of each task in any order shorter than ``known``; infinite where
            there is none.
    """
    lanes = len(count)
    shorter, tiny = known * (1 - 1e-9), known * 1e-13
    starts[:] = np.inf
    total, work = 0, 0.0
    radix = np.ones(lanes, np.int64)
    for c in range(lanes):
        total += count[c]
        work += count[c] * time[c]
        if c:
            radix[c] = radix[c - 1] * (count[c - 1] + 1)
    size = 2 + pending
    now_counts = np.zeros((1, lanes), np.int64)
    states = np.zeros((1, size))
    made = 1
    offset = np.zeros(lanes, np.int64)
    ready = np.zeros(lanes)
    for _ in range(total):
        n = len(states)
        parent = np.empty(n * lanes, np.int64)
        lane = np.empty(n * lanes, np.int64)
        begin = np.empty(n * lanes)
        keys = np.empty(n * lanes, np.int64)
        children = 0
        for k in range(n):
            at = now_counts[k]
            held, left, place, key = live, work, 2, 0
            for c in range(lanes):
                held += at[c] * delta[c]
                left -= at[c] * time[c]
                key += at[c] * radix[c]
                offset[c] = place
                if user_first[c] < user_first[c + 1]:
                    low = at[c]
                    for u in range(user_first[c], user_first[c + 1]):
                        low = min(low, at[user[u]])
                    offset[c] = place - low  # the end of task m is at offset + m
                    place += at[c] - low
            # Of the lanes whose next task needs no memory, the one that ends it first: no other need begin after that.
            soon, until = -1, np.inf
            for c in range(lanes):
                m = at[c]
                ready[c] = np.inf
                if m == count[c] or held + take[c] > room:
                    continue
                start = max(states[k, 0], head[c, m])
                for a in range(arc_first[c], arc_first[c + 1]):
                    e = arc_from[a]
                    start = max(start, states[k, offset[e] + m] + arc_lag[a]) if at[e] > m else np.inf
                ready[c] = start
                if take[c] == 0.0 and delta[c] <= 0.0 and start + time[c] < until:
                    soon, until = c, start + time[c]
            for c in range(lanes):
                start = ready[c]
                if start == np.inf or (c != soon and start >= until):
                    continue
                end = start + time[c]
                value = max(states[k, 1], end + tail[c, at[c]])
                if max(value, end + left - time[c]) >= shorter:
                    continue
                starts[c, at[c]] = min(starts[c, at[c]], start)
                parent[children], lane[children], begin[children] = k, c, start
                keys[children] = key + radix[c]
                children += 1
        order = np.argsort(keys[:children], kind="mergesort")
        next_counts = np.empty((children, lanes), np.int64)
        following = np.empty((children, size))
        kept = first = 0
        while first < children:
            own = kept
            last = first
            while last < children and keys[order[last]] == keys[order[first]]:
                x = order[last]
                k, c = parent[x], lane[x]
                at = now_counts[k]
                # The child's ends, in the place after the last one kept so far.
                row = following[kept]
                row[0] = begin[x] + time[c]
                row[1] = max(states[k, 1], row[0] + tail[c, at[c]])
                old = place = 2
                for e in range(lanes):
                    next_counts[kept, e] = at[e] + (e == c)
                    if user_first[e] == user_first[e + 1]:
                        continue
                    low, high = at[e], at[e] + (e == c)
                    for u in range(user_first[e], user_first[e + 1]):
                        low = min(low, at[user[u]])
                    left_out = high
                    for u in range(user_first[e], user_first[e + 1]):
                        left_out = min(left_out, at[user[u]] + (user[u] == c))
                    if place + high - left_out > size:
                        return -1.0, made
                    for m in range(left_out, high):
                        row[place] = row[0] if m == at[e] else states[k, old + m - low]
                        place += 1
                    old += at[e] - low
                worse = False
                for y in range(own, kept):
                    worse = True
                    for q in range(place):
                        if following[y, q] > row[q] + tiny:
                            worse = False
                            break
                    if worse:
                        break
                if not worse:
                    y = own
                    while y < kept:
                        better = True
                        for q in range(place):
                            if row[q] > following[y, q] + tiny:
                                better = False
                                break
                        if better:  # the last one kept takes its place
                            kept -= 1
                            for q in range(place):
                                following[y, q], following[kept, q] = following[kept, q], following[kept + 1, q]
                            next_counts[kept] = next_counts[kept + 1]
                            row = following[kept]
                        else:
                            y += 1
                    kept += 1
                    if kept - own > width:
                        kept = _join_closest(following, own, kept, place)
                last += 1
            first = last
        if not kept:
            return known, made
        made += kept
        if made > most:
            return -1.0, made
        now_counts = next_counts[:kept].copy()
        states = following[:kept].copy()
    best = known
    for k in range(len(states)):
        best = min(best, max(states[k, 0], states[k, 1]))
    return best, made


@compiled
def _join_closest(rows: Floats, first: int, stop: int, size: int) -> int:
    """Join the two closest rows to one with the smaller of each number; return where the rows end then."""
    least, one, other = np.inf, first, first + 1
    for x in range(first, stop):
        for y in range(x + 1, stop):
            apart = 0.0
            for q in range(size):
                apart += abs(rows[x, q] - rows[y, q])
            if apart < least:
                least, one, other = apart, x, y
    for q in range(size):
        rows[one, q] = min(rows[one, q], rows[other, q])
        rows[other, q] = rows[stop - 1, q]
    return stop - 1


WIDTHS = (2, 8, 32)
"""States of a list: short lists take no time, long ones are tighter."""
PENDING = 64
"""Ends of tasks that one state holds at most."""
ROUNDS = 4
"""Times that every device is looked at with lists of one width."""
CLOSE = 1e-9


def one_device_bound(p: Problem, known: float, most: int) -> float:
    """Return a lower bound on the makespan of any order within the memory limit; ``known`` if none is shorter.

    Args:
        p: the problem.
        known: the makespan of some order.
        most: states to make, over all devices; one to four million take a second.
    """
    sweeps = _Sweeps(p, known, most)
    best = 0.0
    for width in WIDTHS:
        for _ in range(ROUNDS):
            result = [sweeps.look_at(d, width) for d in range(p.devices)]
            best = max(best, *(bound for bound, _ in result))
            if best >= known * (1 - CLOSE):
                return known
            if sweeps.left <= 0:
                return best
            if not any(moved for _, moved in result):
                break
    return best


@dataclass(slots=True)
class _Device:
    """One device's lanes, and how long a micro-batch is under way between them."""

    own: list[int]
    arcs: list[tuple[int, int, float]]
    """(lane, lane, lag): numbers in ``own``; the second starts no sooner than that after the end of the first."""
    looked_at: bool
    """Whether its states are few enough."""


class _Sweeps:
    """Bounds on every task, which every look at a device may tighten."""

    def __init__(self, p: Problem, known: float, most: int) -> None:
        self.p, self.known, self.left = p, known, most
        self.before = all_edges(p)
        self.heads = earliest_starts(p, self.before)
        self.tails = remaining_times(p, self.before)
        self.devices = [_device(p, own) for own in p.lanes_of]

    def look_at(self, d: int, width: int) -> tuple[float, bool]:
        """A bound by one device, and whether that tells more of any task than was known."""
        bound, moved = 0.0, False
        for back in (False, True):
            if not self.devices[d].looked_at or self.left <= 0:
                break
            result, starts = self.swept(d, width, back)
            bound = max(bound, result)
            if bound >= self.known * (1 - CLOSE):
                return self.known, False
            times = self.tails if back else self.heads
            for t, at in starts.items():
                if at > times[t] + CLOSE * self.known:
                    times[t], moved = at, True
        if moved:
            self.heads = earliest_starts(self.p, self.before, known=self.heads)
            self.tails = remaining_times(self.p, self.before, known=self.tails)
        return bound, moved

    def swept(self, d: int, width: int, back: bool) -> tuple[float, dict[int, float]]:
        """The bound, and the earliest start of each of the device's tasks; none if there are too many states.

        ``back``: of the step that runs backwards, whose starts are the times left after each task.
        """
        p, one = self.p, self.devices[d]
        own, way = one.own, -1 if back else 1
        count = np.array([p.count[c] for c in own], np.int64)
        tasks = [list(tasks_of(p, c))[::way] for c in own]
        head, tail = (self._table(tasks, of) for of in (self.heads, self.tails)[::way])
        starts = np.zeros_like(head)
        takes, frees = (self._of(own, values) for values in (p.takes, p.frees))
        delta = takes - frees
        arcs = sorted(((b, a, lag) if back else (a, b, lag) for a, b, lag in one.arcs), key=lambda arc: arc[1])
        users = sorted((a, b) for a, b, _ in arcs)
        bound, made = least_starts(
            count,
            self._of(own, p.time),
            head,
            tail,
            _firsts([b for _, b, _ in arcs], len(own)),
            np.array([a for a, _, _ in arcs], np.int64),
            np.array([lag for _, _, lag in arcs], np.float64),
            _firsts([a for a, _ in users], len(own)),
            np.array([b for _, b in users], np.int64),
            float(count @ delta) if back else 0.0,
            -delta if back else delta,
            frees if back else takes,
            p.cap[d] * (1 + CLOSE) + CLOSE,
            float(self.known),
            width,
            self.left,
            PENDING,
            starts,
        )
        self.left -= made
        if bound < 0:
            one.looked_at = False
            return 0.0, {}
        earliest = zip(tasks, starts.tolist(), strict=True)
        return bound, {t: at for row, times in earliest for t, at in zip(row, times, strict=False)}

    def _table(self, tasks: list[list[int]], times: list[float]) -> Floats:
        """(lanes, tasks of the longest): a time of each task."""
        table = np.zeros((len(tasks), max(map(len, tasks))))
        for a, row in enumerate(tasks):
            table[a, : len(row)] = [times[t] for t in row]
        return table

    def _of(self, own: list[int], values: list[float]) -> Floats:
        return np.array([values[c] for c in own], np.float64)


def _device(p: Problem, lanes: list[int]) -> _Device:
    """The arcs between the device's own lanes; those that others imply are left out."""
    own = [c for c in lanes if p.count[c]]
    far: dict[tuple[int, int], float] = {}
    for a, c in enumerate(own):
        for b, e in enumerate(own):
            if a != b and p.replica[c] == p.replica[e] and (path := longest(p, c, e)) > -math.inf:
                far[a, b] = path - p.time[c] - p.time[e]
    tiny = CLOSE * max(far.values(), default=0.0)

    def implied(a: int, b: int, lag: float) -> bool:
        between = (x for x in range(len(own)) if (a, x) in far and (x, b) in far)
        return any(far[a, x] + p.time[own[x]] + far[x, b] >= lag - tiny for x in between)

    arcs = [(a, b, lag) for (a, b), lag in far.items() if not implied(a, b, lag)]
    return _Device(own, arcs, bool(own) and math.prod(p.count[c] + 1 for c in own) < 2**62)


def _firsts(numbers: list[int], lanes: int) -> Ints:
    """Where each lane's entries begin in a list that is sorted by lane."""
    return np.searchsorted(np.array(numbers, np.int64), np.arange(lanes + 1)).astype(np.int64)
