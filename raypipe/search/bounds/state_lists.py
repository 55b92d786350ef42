"""Every order of one device's tasks at once, in short lists of states: the machine code of ``one_device``.

A state is what a beginning of an order leaves behind: how many tasks of each lane have run, when the device is free,
when each task ended that another one of the device still waits for, and the least makespan that follows from tails. Of
two states with as many tasks of each lane, one that is no later in anything makes the other superfluous. Where more
states are left than a list holds, the two closest become one that has the earlier time of both in everything: it stands
for no order, but is followed by nothing later than what follows either. So the least makespan of the last states is a
lower bound, and the optimum of the one device if no two were joined. (A relaxed decision diagram: Bergman, Cire, van
Hoeve, Hooker 2016, chapter 4.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raypipe.machine_code import compiled

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
                            following[y, :place] = following[kept, :place]
                            following[kept, :place] = following[kept + 1, :place]
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
