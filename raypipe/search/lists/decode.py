"""Decode desired start times into a memory-feasible order (ruin and recreate).

Where devices' memory is full, hardly any single move of the tabu search keeps the limit; rebuilding the order from
perturbed start times does. This resembles iterated greedy (Ruiz and Stuetzle 2007) over random keys (Bean 1994).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from raypipe.search.lists.list_scheduling import LaneArrays, floats
from raypipe.search.problem import DeviceOrders


def decode(layout: LaneArrays, wish: Sequence[float], patience: float) -> DeviceOrders | None:
    """Run tasks in the order of their desired start times, as far as dependencies and memory allow.

    Args:
        layout: the problem.
        wish: desired start per task, ascending within each lane.
        patience: a free device stays idle, rather than start a ready task, if another task that is not ready yet has
            a desired start earlier by more than this.

    Returns:
        The order, or None on a deadlock: every device waits for memory.
    """
    from raypipe.search.lists import kernel

    whole, tasks, places = kernel.decode(layout.flat, floats(wish), float(patience))
    return layout.orders(tasks, places) if whole else None


def disturbed(layout: LaneArrays, starts: Sequence[float], makespan: float, rng: random.Random) -> list[float]:
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
