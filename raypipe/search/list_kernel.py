"""The loops that build one order, as machine code: list scheduling, decoding of desired starts, deadlock avoidance.

They read a problem as flat arrays. Where a lane has a list of other lanes, all lists stand one after another in one
array, and ``..._at[c]`` says where that of lane c begins; its end is where the next one begins.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.machine_code import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STAGES, SAFE, NONE = 0, 1, 2
"""How deadlock is avoided; see ``list_scheduling.Reserve``."""


class Flat(NamedTuple):
    """The lanes of a problem; see ``problem.Problem`` for what has the same name there."""

    time: Floats
    counts: Ints
    """Per lane, its number of tasks."""
    base: Ints
    device: Ints
    takes: Floats
    frees: Floats
    cap: Floats
    """Per device."""
    group: Ints
    """Per lane, the number of its (replica, stage)."""
    lead: Ints
    """Per lane, what its task adds to the number of forwards ahead of backwards."""
    entry: Ints
    """Per lane, the first F lane of its replica."""
    waits: Floats
    """Per lane, the number of tasks that one of its tasks waits for."""
    after_at: Ints
    after: Ints
    """The lanes that wait for it."""
    lag: Floats
    """The latency to each of them."""
    near_at: Ints
    near: Ints
    """The lanes of its device that it waits for."""
    later_at: Ints
    later: Ints
    """The allocating lanes of later stages on its device, if it allocates."""
    lanes_at: Ints
    """Per device."""
    lanes: Ints
    """The lanes of each device, in ascending order."""
    firsts_at: Ints
    """Per replica, as all fields below."""
    firsts: Ints
    """The lanes that begin a stage (F)."""
    lasts_at: Ints
    lasts: Ints
    """The lanes that end a stage: W or BW, and B or F where it is frozen."""
    claims_at: Ints
    claims: Ints
    """The lanes that allocate."""
    brief: Ints
    """Per such lane, 1 if what it allocates is there for one task only: R, or F of a stage without a backward."""
    returns_at: Ints
    returns: Ints
    """The lanes that free memory."""


@compiled
def _earliest(wake: Floats, top: Ints, d: int) -> None:
    """Repair the tournament of the devices' next events after one of device d has changed.

    ``top[1]`` is the device with the earliest event, of equally early ones the first.
    """
    k = (len(top) // 2 + d) // 2
    while k:
        a, b = top[2 * k], top[2 * k + 1]
        top[k] = a if wake[a] <= wake[b] else b
        k //= 2


@compiled
def _tournament(devices: int) -> tuple[Floats, Ints]:
    """When each device has its next event, 0 at first, and who is first; places up to a power of two stay empty."""
    width = 1
    while width < devices:
        width *= 2
    wake = np.full(width, np.inf)
    wake[:devices] = 0.0
    top = np.zeros(2 * width, np.int64)
    for d in range(width):
        top[width + d] = d
    for k in range(width - 1, 0, -1):
        top[k] = top[2 * k]
    return wake, top


@compiled
def _fits(flat: Flat, r: int, m: int, done: Ints, left: Floats, need: Floats, brief: Floats, met: Ints) -> bool:
    """Return whether the remaining claims of micro-batch m of replica r fit; it recomputes one stage at a time."""
    need[:] = 0.0
    brief[:] = 0.0
    met[:] = 0
    for k in range(flat.claims_at[r], flat.claims_at[r + 1]):
        c = flat.claims[k]
        if m >= done[c]:
            d = flat.device[c]
            met[d] = 1
            if flat.brief[k]:
                brief[d] = max(brief[d], flat.takes[c])
            else:
                need[d] += flat.takes[c]
    fine = True
    for d in range(len(left)):
        fine = fine and (not met[d] or need[d] + brief[d] <= left[d])
    return fine


@compiled
def safe(flat: Flat, done: Ints, live: Floats) -> bool:
    """Return whether some order lets every micro-batch in flight finish within memory (Dijkstra's banker's algorithm).

    On a device with several stages, forwards of one stage may fill the memory that another stage needs before anything
    is freed. Micro-batches are the processes of the algorithm and activations the resource: a micro-batch in flight
    claims one activation at every stage that it has not reached, and frees all of them when it ends.

    Args:
        flat: the problem.
        done: per lane, tasks that were started.
        live: per device, live activations.
    """
    replicas = len(flat.claims_at) - 1
    left = flat.cap - live + 1e-9
    need, brief, met = np.empty_like(left), np.empty_like(left), np.empty(len(left), np.int64)
    oldest, newest = np.zeros(replicas, np.int64), np.zeros(replicas, np.int64)
    for r in range(replicas):
        first, last = flat.lasts_at[r], flat.firsts_at[r]
        low, high = done[flat.lasts[first]], done[flat.firsts[last]]
        for k in range(first, flat.lasts_at[r + 1]):
            low = min(low, done[flat.lasts[k]])
        for k in range(last, flat.firsts_at[r + 1]):
            high = max(high, done[flat.firsts[k]])
        oldest[r], newest[r] = low, high
    stuck, r = 0, 0
    while stuck < replicas:
        m = oldest[r]
        if m < newest[r] and _fits(flat, r, m, done, left, need, brief, met):
            for k in range(flat.claims_at[r], flat.claims_at[r + 1]):
                c = flat.claims[k]
                if m < done[c]:
                    left[flat.device[c]] += flat.takes[c]
            for k in range(flat.returns_at[r], flat.returns_at[r + 1]):
                c = flat.returns[k]
                if m < done[c]:
                    left[flat.device[c]] -= flat.frees[c]
            oldest[r] += 1
            stuck = 0
        else:
            stuck += 1
            r = (r + 1) % replicas
    finished = True
    for r in range(replicas):
        finished = finished and oldest[r] >= newest[r]
    return finished


@compiled
def _safe_after(flat: Flat, c: int, done: Ints, live: Floats) -> bool:
    """Return whether all is safe still once lane c has run its next task, which allocates."""
    d = flat.device[c]
    before = live[d]
    done[c] += 1
    live[d] += flat.takes[c]
    fine = safe(flat, done, live)
    done[c] -= 1
    live[d] = before
    return fine


@compiled
def per_task(flat: Flat, key: Floats, pace: float) -> Floats:
    """Return for each task its lane's value, plus the pace times its number in the lane."""
    result = np.empty(flat.counts.sum())
    for c in range(len(flat.counts)):
        for m in range(flat.counts[c]):
            result[flat.base[c] + m] = key[c] + pace * m
    return result


@compiled
def _places(flat: Flat) -> Ints:
    """Where each device's tasks begin in an array of all tasks, device by device; D + 1 values."""
    result = np.zeros(len(flat.cap) + 1, np.int64)
    for d in range(len(flat.cap)):
        result[d + 1] = result[d]
        for k in range(flat.lanes_at[d], flat.lanes_at[d + 1]):
            result[d + 1] += flat.counts[flat.lanes[k]]
    return result


@compiled
def _awaited(
    flat: Flat, d: int, limit: float, due: Floats, now: float, at: Floats, need: Floats, nxt: Ints, live: Floats
) -> bool:
    """Return whether device d has room for a task that is due before the limit and has not arrived yet."""
    for k in range(flat.lanes_at[d], flat.lanes_at[d + 1]):
        c = flat.lanes[k]
        t = flat.base[c] + nxt[c]
        if (
            nxt[c] == flat.counts[c]
            or due[t] >= limit
            or (flat.takes[c] and live[d] + flat.takes[c] > flat.cap[d] + 1e-9)
        ):
            continue
        if not need[t] and at[t] > now:
            return True
        if need[t]:
            near = True
            for j in range(flat.near_at[c], flat.near_at[c + 1]):
                near = near and nxt[flat.near[j]] > nxt[c]
            if near:
                return True
    return False


@compiled
def list_schedule(
    flat: Flat,
    due: Floats,
    slack: float,
    patience: Floats,
    ahead: Floats,
    reserve: int,
    useless: float,
    power: float,
    in_spans: bool,
) -> tuple[bool, Ints, Ints, Floats, Floats]:
    """See ``list_scheduling.list_schedule``, and ``decode`` there, which is the same with a slack.

    A device takes as long as its tasks and what it idles between them. As soon as that makes the mean over devices
    useless, there is no order.

    Args:
        flat: the problem.
        due: per task; of the ready ones the earliest runs first. Ascending within a lane.
        slack: a device stays idle rather than start a task, if another that may not even be ready in time is due
            earlier by more than this; infinite for never. Where all devices idle for memory, that ends.
        patience: per lane, see ``list_scheduling.Setting``; zeros for none.
        ahead: per lane, see there; infinite for any number.
        reserve: ``STAGES``, ``SAFE`` or ``NONE``.
        useless: an order of this mean or more is of no use; infinite where each is.
        power: of the mean over devices.
        in_spans: of their times from their first starts, and not from the step's begin.

    Returns:
        Whether all tasks ran; the tasks, device by device in the order they run; where each device's begin; when
        devices end; and how long they take from their first start.
    """
    devices, count, base, takes, device = len(flat.cap), flat.counts, flat.base, flat.takes, flat.device
    never = np.inf
    need, at = per_task(flat, flat.waits, 0.0), np.zeros(len(due))
    nxt = np.zeros(len(count), np.int64)
    free, live, begun = np.zeros(devices), np.zeros(devices), np.full(devices, -1.0)
    groups = flat.group.max() + 1
    lead, held = np.zeros(groups, np.int64), np.zeros(groups)
    # The lanes whose next task waits for no other to run: device d's from lanes_at[d] on.
    ready, readies, least = np.empty_like(flat.lanes), np.zeros(devices, np.int64), np.zeros(devices)
    for c in range(len(count)):
        d = device[c]
        least[d] += count[c] * flat.time[c]
        if count[c] and not flat.waits[c]:
            ready[flat.lanes_at[d] + readies[d]] = c
            readies[d] += 1
    wake, top = _tournament(devices)
    places = _places(flat)
    order, ran = np.empty(len(due), np.int64), places[:-1].copy()
    # Of the device at hand, the ready tasks that are still to arrive: when, and when they are due.
    coming_at, coming_due = np.empty(len(count)), np.empty(len(count))
    left = len(due)
    while left:
        d = top[1]
        now = wake[d]
        if now == never:  # every device idles for a task that waits for memory
            if slack == never:
                return False, order, places, free, free
            slack, now = never, free.max()
            free[:] = now
            for o in range(devices):
                wake[o] = now
                _earliest(wake, top, o)
            continue
        best, best_due, soon, coming = -1, never, never, 0
        begin = flat.lanes_at[d]
        for k in range(begin, begin + readies[d]):
            c = ready[k]
            taken = takes[c]
            if taken:
                room = flat.cap[d] - live[d] - taken + 1e-9
                if room < 0 or lead[flat.group[c]] >= ahead[c]:
                    continue
                if reserve != NONE:
                    for j in range(flat.later_at[c], flat.later_at[c + 1]):
                        e = flat.later[j]
                        if not held[flat.group[e]] and nxt[e] < (count[e] if reserve == STAGES else nxt[flat.entry[e]]):
                            room -= takes[e]
                    if room < 0:
                        continue
            t = base[c] + nxt[c]
            if at[t] > now:
                soon = min(soon, at[t])
                coming_at[coming], coming_due[coming] = at[t], due[t]
                coming += 1
            elif (due[t] < best_due or (due[t] == best_due and c < best)) and (
                not taken or reserve != SAFE or _safe_after(flat, c, nxt, live)
            ):
                best, best_due = c, due[t]
        if best >= 0 and slack < never and _awaited(flat, d, best_due - slack, due, now, at, need, nxt, live):
            best = -1
        if best >= 0 and now + patience[best] > soon:
            for k in range(coming):
                if coming_due[k] < best_due and coming_at[k] < now + patience[best]:
                    best = -1
                    break
        if best < 0:
            wake[d] = soon
            _earliest(wake, top, d)
            continue
        if now > free[d] and not (in_spans and begun[d] < 0):
            least[d] += now - free[d]
            if least[d] > useless:
                total = 0.0
                for o in range(devices):
                    total += (least[o] / useless) ** power
                if total >= devices:
                    return False, order, places, free, free
        c = best
        m = nxt[c]
        nxt[c] = m + 1
        t = base[c] + m
        order[ran[d]] = t
        ran[d] += 1
        left -= 1
        if m + 1 == count[c] or need[t + 1]:
            k = begin
            while ready[k] != c:
                k += 1
            readies[d] -= 1
            ready[k] = ready[begin + readies[d]]
        end = now + flat.time[c]
        if begun[d] < 0:
            begun[d] = now
        free[d] = wake[d] = end
        _earliest(wake, top, d)
        g = flat.group[c]
        change = takes[c] - flat.frees[c]
        live[d] += change  # nothing else starts on the device before the task ends, so free right away
        held[g] += change
        lead[g] += flat.lead[c]
        for j in range(flat.after_at[c], flat.after_at[c + 1]):
            e = flat.after[j]
            t = base[e] + m
            arrival = end + flat.lag[j]
            if arrival > at[t]:
                at[t] = arrival
            need[t] -= 1
            if not need[t]:
                o = device[e]
                if nxt[e] == m:
                    ready[flat.lanes_at[o] + readies[o]] = e
                    readies[o] += 1
                arrival = at[t]
                if o != d and free[o] <= arrival < wake[o]:
                    wake[o] = arrival
                    _earliest(wake, top, o)
    for d in range(devices):
        if begun[d] < 0:
            begun[d] = 0.0
    return True, order, places, free, free - begun


@compiled
def by_priority(
    flat: Flat, key: Floats, pace: float, patience: Floats, ahead: Floats, reserve: int
) -> tuple[bool, Ints, Ints, Floats, Floats]:
    """List schedule by the settings of ``list_scheduling.Setting``, in one call from Python."""
    due = per_task(flat, key, pace)
    return list_schedule(flat, due, np.inf, patience, ahead, reserve, np.inf, 1.0, False)


class Template(NamedTuple):
    """The common part of all chains of so many stages, wherever they are placed; see ``chains``."""

    flat: Flat
    stage: Ints
    """Per lane, as all that follows."""
    kind: Ints
    """``FORWARD``, ``INPUT_GRAD`` or ``WEIGHT_GRAD``."""
    in_turn: Ints
    """All lanes in topological order."""
    source: Ints
    """Per entry of ``flat.after``, the lane that is waited for."""
    takes_whole: Floats
    takes_waiting: Floats
    """How much of its stage's two sizes a task allocates."""
    frees_whole: Floats
    frees_waiting: Floats
    """How much it frees."""


FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2


@compiled
def place(of: Template, row: Ints, times: Floats, sizes: Floats, lag: Floats, cap: Floats) -> Flat:
    """The lanes of a chain whose stages are on these devices.

    Only ``list_schedule`` reads it, and not with ``SAFE``.

    Args:
        of: of so many stages.
        row: the device of each stage.
        times: of F, B and W of each stage; (S, 3).
        sizes: what an activation takes up to its B, and from there to its W; (S, 2).
        lag: between each stage and the next, if they are on different devices.
        cap: memory limit per device.
    """
    flat, devices, lanes = of.flat, len(cap), len(of.stage)
    time, takes, frees = np.empty(lanes), np.empty(lanes), np.empty(lanes)
    device, lanes_at = np.empty(lanes, np.int64), np.zeros(devices + 1, np.int64)
    for c in range(lanes):
        s = of.stage[c]
        time[c] = times[s, of.kind[c]]
        takes[c] = of.takes_whole[c] * sizes[s, 0] + of.takes_waiting[c] * sizes[s, 1]
        frees[c] = of.frees_whole[c] * sizes[s, 0] + of.frees_waiting[c] * sizes[s, 1]
        device[c] = row[s]
        lanes_at[row[s] + 1] += 1
    for d in range(devices):
        lanes_at[d + 1] += lanes_at[d]
    own, filled = np.empty(lanes, np.int64), lanes_at.copy()
    for c in range(lanes):
        own[filled[device[c]]] = c
        filled[device[c]] += 1
    between = np.zeros(len(flat.after))
    for k in range(len(flat.after)):
        a, b = of.stage[of.source[k]], of.stage[flat.after[k]]
        if row[a] != row[b]:
            between[k] = lag[min(a, b)]
    later_at, count = np.zeros(lanes + 1, np.int64), 0
    later = np.empty(len(row) ** 2, np.int64)  # one lane of a stage allocates
    for c in range(lanes):
        if takes[c]:
            for k in range(lanes_at[device[c]], lanes_at[device[c] + 1]):
                e = own[k]
                if takes[e] and flat.group[e] > flat.group[c]:
                    later[count] = e
                    count += 1
        later_at[c + 1] = count
    return Flat(
        time,
        flat.counts,
        flat.base,
        device,
        takes,
        frees,
        cap,
        flat.group,
        flat.lead,
        flat.entry,
        flat.waits,
        flat.after_at,
        flat.after,
        between,
        flat.near_at,
        flat.near,
        later_at,
        later[:count].copy(),
        lanes_at,
        own,
        flat.firsts_at,
        flat.firsts,
        flat.lasts_at,
        flat.lasts,
        flat.claims_at,
        flat.claims,
        flat.brief,
        flat.returns_at,
        flat.returns,
    )


@compiled
def due_dates(flat: Flat, kind: Ints, in_turn: Ints, numbers: Floats) -> tuple[Floats, float, Floats]:
    """See ``priorities.paced``.

    Args:
        flat: the problem.
        kind: per lane, ``FORWARD`` (R as well), ``INPUT_GRAD`` (BW as well) or ``WEIGHT_GRAD``.
        in_turn: all lanes in topological order.
        numbers: ahead, back, lead, wait, patience.

    Returns:
        The key of each lane, the pace, and the patience of each lane.
    """
    ahead, back, lead, wait, patient = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    lanes = len(kind)
    trips, key, patience = np.zeros(lanes), np.empty(lanes), np.zeros(lanes)
    for k in range(lanes - 1, -1, -1):
        c = in_turn[k]
        longest = 0.0
        for j in range(flat.after_at[c], flat.after_at[c + 1]):
            longest = max(longest, trips[flat.after[j]] + flat.lag[j])
        trips[c] = flat.time[c] + longest
    pace = 0.0
    for d in range(len(flat.cap)):
        work = 0.0
        for k in range(flat.lanes_at[d], flat.lanes_at[d + 1]):
            if flat.counts[flat.lanes[k]]:
                work += flat.time[flat.lanes[k]]
        pace = max(pace, work)
    for c in range(lanes):
        if kind[c] == FORWARD:
            key[c] = -ahead * trips[c]
        elif kind[c] == INPUT_GRAD:
            key[c] = -back * trips[c] - lead * pace
        else:
            key[c] = wait * pace
            patience[c] = patient * flat.time[c]
    return key, pace, patience


@compiled
def paced_ends(
    of: Template,
    row: Ints,
    times: Floats,
    sizes: Floats,
    lag: Floats,
    cap: Floats,
    numbers: Floats,
    ahead: Floats,
    useless: float,
    power: float,
    in_spans: bool,
) -> tuple[Floats, Floats]:
    """When each device ends, and how long it takes from its first start, in orders by due dates.

    Args:
        of, row, times, sizes, lag, cap: see ``place``.
        numbers: of each order, see ``due_dates``; (orders, 5).
        ahead: of each order, how many forwards each stage may run ahead of its backwards; (orders, S).
        useless, power, in_spans: see ``list_schedule``.

    Returns:
        Two arrays, (orders, D); infinite where there is none.
    """
    flat = place(of, row, times, sizes, lag, cap)
    ends, spans = np.full((len(numbers), len(cap)), np.inf), np.full((len(numbers), len(cap)), np.inf)
    limit = np.full(len(of.stage), np.inf)
    for k in range(len(numbers)):
        for c in range(len(limit)):
            if of.kind[c] == FORWARD:
                limit[c] = ahead[k, of.stage[c]]
        key, pace, patience = due_dates(flat, of.kind, of.in_turn, numbers[k])
        due = per_task(flat, key, pace)
        whole, _, _, end, span = list_schedule(flat, due, np.inf, patience, limit, STAGES, useless, power, in_spans)
        if whole:
            ends[k], spans[k] = end, span
    return ends, spans
