"""The walk over orders of one problem along the critical path, as machine code, and what walks accept.

A makespan only falls if a task of the critical path moves to the edge of its block or beyond; a block is a run of
critical tasks of one device without a gap (Nowicki and Smutnicki 1996). So a move takes a critical task past its
neighbour, or as far within its block as dependencies allow, and simulated annealing says which moves stay (van
Laarhoven, Aarts and Lenstra 1992).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raypipe.machine_code import compiled
from raypipe.search.list_kernel import Flat, Floats, Ints

Seed = NDArray[np.uint64]
LOOK = 12
"""A task that frees memory is pulled forward past so many others at most."""


@compiled
def drawn(seed: Seed) -> float:
    """The next random number from 0 up to 1 (splitmix64, Steele, Lea and Flood 2014)."""
    seed[0] += np.uint64(0x9E3779B97F4A7C15)
    z = seed[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / 9007199254740992.0


@compiled
def below(seed: Seed, most: int) -> int:
    """A random number from 0 up to ``most``."""
    return int(drawn(seed) * most)


@compiled
def accepted(value: float, heat: float, seed: Seed) -> float:
    """The value up to which a walk goes on from ``value``: simulated annealing's rule, drawn before there is another.

    ``heat`` is the temperature as a share of the value (Kirkpatrick, Gelatt and Vecchi 1983).
    """
    return float(value - heat * abs(value) * np.log(1.0 - drawn(seed)))


@compiled
def timed(
    flat: Flat,
    lane: Ints,
    tail: Floats,
    order: Ints,
    places: Ints,
    release: Floats,
    due: Floats,
    most: float,
    begin: Floats,
    via: Ints,
    turn: Ints,
    seed: Seed,
) -> float:
    """Time an order in which each task begins as soon as it can.

    Args:
        flat: the problem.
        lane: of each task.
        tail: per lane, what comes at least behind the end of one of its tasks, ``due`` in it.
        order, places: the tasks, device by device, and where each device's begin.
        release, due: see ``order_walk.Frame``.
        most: an order that is longer is of no use.
        begin: where each task's begin is written.
        via: where the task is written whose end it waits for, -1 for none; of several any one.
        turn: where the tasks are written in an order in which none waits for a later one.
        seed: of the random numbers.

    Returns:
        The order's value in the frame; infinite if it cannot run, or is longer than ``most``.
    """
    n, ready = len(lane), 0
    need, behind = np.empty(n, np.int64), np.full(n, -1)
    for t in range(n):
        need[t] = int(flat.waits[lane[t]])
    for d in range(len(places) - 1):
        for k in range(places[d], places[d + 1]):
            t = order[k]
            begin[t], via[t] = release[d], -1
            if k > places[d]:
                behind[order[k - 1]] = t
                need[t] += 1
            if not need[t]:
                turn[ready] = t
                ready += 1
    value, ran = -np.inf, 0
    while ran < ready:
        t = turn[ran]
        ran += 1
        c = lane[t]
        m, end = t - flat.base[c], begin[t] + flat.time[c]
        if end + tail[c] > most:
            return np.inf
        value = max(value, end + due[flat.device[c]])
        for j in range(flat.after_at[c] - 1, flat.after_at[c + 1]):
            if j < flat.after_at[c]:  # the next one of its device
                s, arrival = behind[t], end
                if s < 0:
                    continue
            else:
                s, arrival = flat.base[flat.after[j]] + m, end + flat.lag[j]
            if arrival > begin[s] or (arrival == begin[s] and (via[s] < 0 or drawn(seed) < 0.5)):
                begin[s], via[s] = arrival, t
            need[s] -= 1
            if not need[s]:
                turn[ready] = s
                ready += 1
    return value if ran == n else np.inf


@compiled
def _critical(flat: Flat, lane: Ints, via: Ints, place: Ints, to: Ints, last: int) -> int:
    """Write the places of those tasks of a critical path that follow the one before on their device.

    Returns their number. The places are in falling order, those of one block one after another.
    """
    count, t = 0, last
    while t >= 0:
        q = via[t]
        if q >= 0 and place[q] == place[t] - 1 and flat.device[lane[q]] == flat.device[lane[t]]:
            to[count] = place[t]
            count += 1
        t = q
    return count


@compiled
def _last(
    flat: Flat, lane: Ints, order: Ints, places: Ints, begin: Floats, due: Floats, value: float, seed: Seed
) -> int:
    """The last task of a device that ends last, of several any one."""
    result, count = -1, 0
    for d in range(len(places) - 1):
        if places[d + 1] > places[d]:
            t = order[places[d + 1] - 1]
            if begin[t] + flat.time[lane[t]] + due[d] >= value - 1e-9 * abs(value):
                count += 1
                if below(seed, count) == 0:
                    result = t
    return result


@compiled
def _tied(flat: Flat, lane: Ints, a: int, b: int) -> bool:
    """Return whether one of two tasks of a device is of the other's lane, or feeds it."""
    c, e = lane[a], lane[b]
    if c == e:
        return True
    if a - flat.base[c] != b - flat.base[e]:
        return False
    result = False
    for j in range(flat.near_at[c], flat.near_at[c + 1]):
        result = result or flat.near[j] == e
    for j in range(flat.near_at[e], flat.near_at[e + 1]):
        result = result or flat.near[j] == c
    return result


@compiled
def _put(order: Ints, k: int, to: int) -> None:
    """Move the task at place ``k`` to place ``to``; those between make way."""
    t, step = order[k], -1 if to < k else 1
    while k != to:
        order[k] = order[k + step]
        k += step
    order[to] = t


@compiled
def _fits(flat: Flat, lane: Ints, order: Ints, first: int, end: int, live: float, cap: float) -> bool:
    """Return whether a device keeps its limit at these places, with so much alive before."""
    for k in range(first, end):
        live += flat.takes[lane[order[k]]]
        if live > cap:
            return False
        live -= flat.frees[lane[order[k]]]
    return True


@compiled
def _fitting(flat: Flat, lane: Ints, order: Ints, begin: int, first: int, final: int, end: int) -> tuple[bool, int]:
    """Keep a device's memory limit after a move between two of its places, or try to.

    Where it is broken, a later task that frees memory is pulled in front, if one of the next ``LOOK`` may be.

    Args:
        flat, lane, order: the problem and its order, which is changed.
        begin, end: where the device's tasks begin and end.
        first, final: the places that have changed.

    Returns:
        Whether the limit is kept; and the last place that has changed now.
    """
    cap, live = flat.cap[flat.device[lane[order[first]]]] + 1e-9, 0.0
    if cap == np.inf:
        return True, final
    for k in range(begin, first):
        live += flat.takes[lane[order[k]]] - flat.frees[lane[order[k]]]
    if _fits(flat, lane, order, first, final + 1, live, cap):
        return True, final
    for k in range(final + 1, min(final + 1 + LOOK, end)):
        if not flat.frees[lane[order[k]]]:
            continue
        free = True
        for j in range(first, k):
            free = free and not _tied(flat, lane, order[j], order[k])
        if free:
            _put(order, k, first)
            return _fits(flat, lane, order, first, k + 1, live, cap), k
    return False, final


@compiled
def walk(
    flat: Flat,
    lane: Ints,
    tail: Floats,
    order: Ints,
    places: Ints,
    release: Floats,
    due: Floats,
    best: Ints,
    shortest: float,
    goal: float,
    hot: float,
    cold: float,
    tries: int,
    seed: Seed,
) -> float:
    """Walk from an order to others, and write down the shortest one.

    Args:
        flat, lane, tail, places, release, due: see ``timed``.
        order: where to begin; where the walk has come to afterwards.
        best, shortest: the shortest order so far, and its value; ``best`` is overwritten by a shorter one.
        goal: stop at this value.
        hot, cold: first and last temperature, see ``accepted``.
        tries: moves that are tried.
        seed: of the random numbers.

    Returns:
        The value of ``best``.
    """
    n = len(lane)
    begin, via, new_via, turn = np.empty(n), np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    place, path, pairs = np.empty(n, np.int64), np.empty(n, np.int64), 0
    for k in range(n):
        place[order[k]] = k
    here = order.copy()
    value = timed(flat, lane, tail, order, places, release, due, np.inf, begin, via, turn, seed)
    if value < shortest:
        best[:], shortest = order, value
    fresh = True
    for number in range(tries):
        if fresh:
            last = _last(flat, lane, order, places, begin, due, value, seed)
            pairs, fresh = _critical(flat, lane, via, place, path, last), False
        if not pairs or shortest <= goal:
            break
        # One of two neighbours in a block moves past the other, and half of the time as far as the block goes.
        at, left, far = below(seed, pairs), drawn(seed) < 0.5, drawn(seed) < 0.5
        step = -1 if left else 1
        k = to = path[at] if left else path[at] - 1
        while not _tied(flat, lane, order[to + step], order[k]):
            to += step
            at -= step
            if not far or at < 0 or at >= pairs or path[at] != path[at + step] + step:
                break
        if to == k:
            continue
        first, final = min(k, to), max(k, to)
        d = flat.device[lane[order[k]]]
        _put(order, k, to)
        fits, final = _fitting(flat, lane, order, places[d], first, final, places[d + 1])
        most, new = accepted(value, hot * (cold / hot) ** (number / tries), seed), np.inf
        if fits:
            new = timed(flat, lane, tail, order, places, release, due, most, begin, new_via, turn, seed)
        if new == np.inf:
            order[first : final + 1] = here[first : final + 1]
            continue
        here[first : final + 1] = order[first : final + 1]
        for j in range(first, final + 1):
            place[order[j]] = j
        via[:] = new_via
        value, fresh = new, True
        if value < shortest - 1e-9 * max(1.0, abs(shortest)):
            best[:], shortest = order, value
    return shortest
