"""Cut, placement and order in turn: a move of the arrangement where the critical path says that time is lost, then a
new order for it, and so on; what is shorter is kept.

An order takes milliseconds, a bound on all orders of an arrangement microseconds (``least_step``). So where the bound
is no shorter than the best step there is no order, and neighbours are ranked by two guesses in turn: their bounds, and
what their step would be if the critical path stayed where it is (the work that a move takes from a device counts by
the share of that device's work that is critical, and what it adds to another one by that one's). Where none of the most
promising is shorter, a short random walk along good bounds leads away from one of the best (iterated local search,
Lourenco, Martin, Stuetzle 2003).

Source of the idea: AdaPtis (arXiv 2509.23722), which tunes the bottleneck of the three in turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from raypipe.plan.joint.arrangement import Arrangement, moves
from raypipe.plan.joint.least_step import LeastStep, annealed
from raypipe.plan.joint.orders_of import Ordered, OrdersOf, critical_share

NEAR = 1.03
"""A quick order within this many times the best is shortened by tabu search."""
TRIED = 10
"""Neighbours of an arrangement that get an order before it is left."""
SHORTEN, LONGER = 60, 250
"""Moves of tabu search on what is promising, and on what is new and best."""
KEPT = 5
"""Arrangements that are handed on: the best, and the most promising by their steps and their bounds together."""
OPENING = 0.4
"""Share of the budget for the first arrangements."""
WALK, ELSEWHERE = 200, 0.1
"""Moves of a random walk away from one of the best, and how many of them put stages elsewhere."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What ranks neighbours."""

    before: Sequence[float]
    """``before[i]``: seconds of the layers before layer i for one micro-batch, there and back."""
    message: float
    """Seconds of a typical message."""
    devices: int
    most_stages: int
    least: LeastStep


def alternate(
    orders: OrdersOf, firsts: Iterable[Arrangement], hints: Hints, goal: float, rng: random.Random
) -> list[Ordered]:  # fmt: skip
    """Return the best arrangements found with their orders, the best first; none if nothing fits.

    Args:
        orders: makes orders, and holds the budget.
        firsts: arrangements to begin with.
        hints: of the model.
        goal: stop at this value: a lower bound, or what is good enough.
        rng: draws the moves that lead away.
    """
    best: dict[Arrangement, Ordered] = {}
    seen: set[Arrangement] = set()
    budget = orders.budget
    after_opening = (1 - OPENING) * budget.seconds

    def keep(found: Ordered) -> None:
        best[found.arrangement] = found
        lead = top().arrangement
        for worst in sorted(best, key=lambda a: (a != lead, best[a].value + hints.least.of(a)))[KEPT:]:
            del best[worst]

    def top() -> Ordered:
        return min(best.values(), key=lambda found: found.value)

    def done() -> bool:
        return budget.left <= 0 or (bool(best) and top().value <= goal * (1 + 1e-9))

    def hopeless(a: Arrangement) -> bool:
        return bool(best) and hints.least.of(a) >= top().value

    for a in firsts:
        if a in seen or done() or hopeless(a) or (best and budget.left < after_opening):
            continue
        seen.add(a)
        found = orders.of(a, first=not best)
        if found is not None:
            keep(orders.shorter(found, SHORTEN, goal) if not best or found.value < NEAR * top().value else found)
    if not best:
        return []
    here = top()
    while not done():
        better = _better_neighbour(orders, here, hints, goal, seen)
        if better is not None:
            here = orders.shorter(better, LONGER, goal) if better.value < top().value * (1 + 1e-9) else better
            keep(here)
            continue
        near = annealed(hints.least, rng.choice(list(best)), hints.most_stages, WALK, rng, 1 - ELSEWHERE)
        a = rng.choice(near[:KEPT])
        away = None if a in seen or hopeless(a) else orders.of(a)
        seen.add(a)
        if away is not None and away.value < 1.1 * top().value:
            here = orders.shorter(away, SHORTEN, goal)
            keep(here)
        else:
            here = rng.choice(list(best.values()))
            again = orders.shorter(here, LONGER, goal)
            if again.value < here.value:
                keep(again)
    return sorted(best.values(), key=lambda found: found.value)


def _better_neighbour(
    orders: OrdersOf, here: Ordered, hints: Hints, goal: float, seen: set[Arrangement]
) -> Ordered | None:  # fmt: skip
    """The first shorter one among the most promising neighbours that were not tried before."""
    a, n = here.arrangement, orders.model.microbatches
    share = critical_share(here, hints.devices)
    loads = a.loads(hints.before, hints.devices)
    slowest = max(loads)

    def change(other: Arrangement) -> float:
        theirs = other.loads(hints.before, hints.devices)
        path = n * sum(c * (new - old) for c, new, old in zip(share, theirs, loads, strict=True))
        limit = n * max(0.0, max(theirs) - slowest)  # no order is shorter than the slowest device's work
        return path + limit + 2 * hints.message * (other.messages() - a.messages())

    near = [b for b in moves(a, hints.devices, hints.most_stages) if b not in seen]
    by_change = sorted(near, key=change)[:TRIED]
    by_bound = sorted(near, key=hints.least.smooth)[:TRIED]
    turns = dict.fromkeys(b for pair in zip(by_bound, by_change, strict=True) for b in pair)
    for b in islice(turns, TRIED):
        if orders.budget.left <= 0:
            return None
        if hints.least.of(b) >= here.value:
            continue
        seen.add(b)
        found = orders.of(b)
        if found is None:
            continue
        if here.value <= found.value < NEAR * here.value:
            found = orders.shorter(found, SHORTEN, goal)
        if found.value < here.value * (1 - 1e-9):
            return found
    return None
