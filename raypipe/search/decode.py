"""Decode desired start times into a memory-feasible order (ruin and recreate).

Where devices' memory is full, hardly any single move of the tabu search keeps the limit; rebuilding the order from
perturbed start times does. This resembles iterated greedy (Ruiz and Stuetzle 2007) over random keys (Bean 1994).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from raypipe.search.list_scheduling import Layout
from raypipe.search.problem import DeviceOrders


def decode(layout: Layout, wish: Sequence[float], patience: float) -> DeviceOrders | None:
    """Run tasks in the order of their desired start times, as far as dependencies and memory allow.

    Args:
        layout: the problem.
        wish: desired start per task, ascending within each lane.
        patience: a free device stays idle, rather than start a ready task, if another task that is not ready yet has
            a desired start earlier by more than this.

    Returns:
        The order, or None on a deadlock: every device waits for memory.
    """
    p = layout.problem
    time, count, base, after, device = p.time, p.count, p.base, p.after, p.device
    takes, frees, lanes_of, cap = p.takes, p.frees, p.lanes_of, p.cap
    safe = layout.safety.safe if any(layout.others) else None
    need, at = layout.needs[:], [0.0] * p.tasks
    nxt, free, live = [0] * len(count), [0.0] * p.devices, [0.0] * p.devices
    orders: DeviceOrders = [[] for _ in range(p.devices)]
    wake = [0.0] * p.devices
    events = [(0.0, d) for d in range(p.devices)]
    push, pop = heapq.heappush, heapq.heappop
    never = float("inf")
    near = layout.near
    while events or _left(nxt, count):
        if not events:  # every device idles for a task that waits for memory: no longer be patient
            if patience == never:
                return None
            patience, now = never, max(free)
            events = [(now, d) for d in range(p.devices)]
            free, wake = [now] * p.devices, [now] * p.devices
        now, d = pop(events)
        if wake[d] != now or free[d] > now:
            continue
        best, value, soon, wanted = -1, never, never, never
        for c in lanes_of[d]:
            m = nxt[c]
            if m == count[c]:
                continue
            t = base[c] + m
            taken = takes[c]
            if taken and live[d] + taken > cap[d] + 1e-9:
                continue
            if need[t]:
                if wish[t] < wanted and all(nxt[e] > m for e in near[c]):
                    wanted = wish[t]
                continue
            if at[t] > now:
                soon = min(soon, at[t])
                wanted = min(wanted, wish[t])
            elif wish[t] < value:
                if taken and safe is not None:
                    nxt[c] += 1
                    live[d] += taken
                    fine = safe(nxt, live)
                    nxt[c] -= 1
                    live[d] -= taken
                    if not fine:
                        continue
                best, value = c, wish[t]
        if best >= 0 and wanted < value - patience:
            best = -1
        if best < 0:
            wake[d] = soon
            if soon < never:
                push(events, (soon, d))
            continue
        c = best
        m = nxt[c]
        nxt[c] = m + 1
        orders[d].append(base[c] + m)
        end = now + time[c]
        free[d] = wake[d] = end
        live[d] += takes[c] - frees[c]
        push(events, (end, d))
        for e, lag in after[c]:
            t = base[e] + m
            arrival = end + lag
            if arrival > at[t]:
                at[t] = arrival
            need[t] -= 1
            if not need[t]:
                o = device[e]
                arrival = at[t]
                if o != d and free[o] <= arrival < wake[o]:
                    wake[o] = arrival
                    push(events, (arrival, o))
    return orders


def disturbed(layout: Layout, starts: Sequence[float], makespan: float, rng: random.Random) -> list[float]:
    """Perturb the start times of an order: within a time window, for single micro-batches, or on one device.

    The result respects dependencies and lanes: no task's desired start lies before those of its predecessors.
    """
    p = layout.problem
    wish = list(starts)
    draw = rng.random()
    if draw < 0.4:
        far = makespan * rng.choice((0.02, 0.05, 0.1, 0.2))
        begin = rng.uniform(-0.2, 1.0) * makespan
        end = begin + rng.uniform(0.1, 0.5) * makespan
        for t, at in enumerate(starts):
            if begin <= at <= end:
                wish[t] += rng.gauss(0, far)
    elif draw < 0.7:
        for _ in range(rng.choice((1, 1, 2))):
            c = rng.randrange(len(p.kind))
            if p.count[c]:
                m, by = rng.randrange(p.count[c]), rng.gauss(0, makespan * 0.1)
                for e in range(len(p.kind)):
                    if p.replica[e] == p.replica[c] and rng.random() < 0.9:
                        wish[p.base[e] + m] += by
    else:
        far = makespan * rng.choice((0.05, 0.1, 0.2))
        for c in p.lanes_of[rng.randrange(p.devices)]:
            for t in range(p.base[c], p.base[c] + p.count[c]):
                if rng.random() < 0.3:
                    wish[t] += rng.gauss(0, far)
    tiny = 1e-9 * max(1.0, makespan)
    for c in layout.in_turn:
        base, least = p.base[c], float("-inf")
        for m in range(p.count[c]):
            least = max([least, wish[base + m], *(wish[p.base[e] + m] + tiny for e, _ in p.before[c])])
            wish[base + m] = least
            least += tiny
    return wish


def _left(done: list[int], count: list[int]) -> bool:
    return done != count
