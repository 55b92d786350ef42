"""Simulated annealing over arrangements, each measured by a quick order of its tasks.

An order takes milliseconds, a bound on all orders of an arrangement microseconds (``least_step``). So annealing by
bounds comes first, and where an arrangement's bound is already longer than what the walk would accept there is no
order. The slowest device alone would say nothing about most moves, as they leave it as it is: all devices count, the
slowest most (``least_step.smooth``).

Sources: AdaPtis (arXiv 2509.23722), which tunes cut, placement and order in turn; simulated annealing (Kirkpatrick,
Gelatt, Vecchi 1983).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from math import log

from raypipe.plan.joint.arrangement import Arrangement, random_move
from raypipe.plan.joint.least_step import LeastStep
from raypipe.plan.joint.orders_of import Ordered, OrdersOf

KEPT = 5
"""Arrangements that are handed on: the best, and the most promising by their steps and their bounds together."""
OPENING = 0.3
"""Share of the budget for the first arrangements."""
HOT, COLD = 0.008, 2e-4
"""First and last temperature, as shares of the step."""
BORDERS = 0.4
"""Share of the moves that move borders; the others put stages elsewhere, or divide or join them."""
SLOWEST = 0.25
"""Share of the moves that are of a stage of the device that is last."""
FEW = 2
"""Ways of list scheduling that a move is measured by."""
SHORTEN = 100
"""Moves of tabu search on what is handed on."""
PARTS = 3
"""Walks, one after another, each from the best of the one before and as warm as the first, in thirds of the time."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of the model's arrangements without an order."""

    devices: int
    most_stages: int
    least: LeastStep


class Best:
    """The arrangements to hand on, with their orders."""

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self.found: dict[Arrangement, Ordered] = {}

    def keep(self, one: Ordered) -> None:
        """Remember an arrangement if it is among the most promising."""
        known = self.found.get(one.arrangement)
        if known is not None and known.value <= one.value:
            return
        self.found[one.arrangement] = one
        if len(self.found) > KEPT:
            lead, least = self.top.arrangement, self.hints.least
            worst = max((a for a in self.found if a != lead), key=lambda a: self.found[a].value + least.of(a))
            del self.found[worst]

    @property
    def top(self) -> Ordered:
        """The one with the shortest order."""
        return min(self.found.values(), key=lambda one: one.value)

    @property
    def value(self) -> float:
        """That order's length; infinite before there is one."""
        return self.top.value if self.found else float("inf")


def arranged(
    orders: OrdersOf, firsts: Iterable[Arrangement], hints: Hints, goal: float, rng: random.Random
) -> list[Ordered]:  # fmt: skip
    """Return the best arrangements found with their orders, the best first; none if nothing fits.

    Args:
        orders: makes orders, and holds the budget.
        firsts: arrangements to begin with.
        hints: of the model.
        goal: stop at this value: a lower bound, or what is good enough.
        rng: draws the moves.
    """
    best, budget, least = Best(hints), orders.budget, hints.least

    def done() -> bool:
        return budget.left <= 0 or best.value <= goal * (1 + 1e-9)

    after_opening = (1 - OPENING) * budget.seconds
    for a in dict.fromkeys(firsts):
        if done() or least.of(a) >= best.value or (best.found and budget.left < after_opening):
            continue
        one = orders.of(a, first=not best.found)
        if one is not None:
            best.keep(one)
    if not best.found:
        return []
    for part in range(PARTS):
        here, most = best.top, budget.left / (PARTS - part)
        until = budget.left - most
        while not done() and budget.left > until:
            spent = 1 - (budget.left - until) / most
            limit = here.mean * (1 - HOT * (COLD / HOT) ** spent * log(1 - rng.random()))
            device = here.slowest if rng.random() < SLOWEST else None
            moved = random_move(here.arrangement, hints.devices, hints.most_stages, rng, BORDERS, device)
            if moved is None or least.of(moved) >= limit:
                continue
            one = orders.of(moved, few=FEW, limit=limit)
            if one is not None and one.mean < limit:
                here = one
                best.keep(one)
    for one in sorted(best.found.values(), key=lambda one: one.value):
        best.keep(orders.shorter(one, SHORTEN, goal))
    return sorted(best.found.values(), key=lambda one: one.value)
