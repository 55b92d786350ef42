"""Simulated annealing over arrangements, each measured by a quick order of its tasks.

An order takes a tenth of a millisecond (``search.lists.chains``), a bound on all orders of an arrangement microseconds
(``least_step``). So annealing by bounds comes first, and where an arrangement's bound is already longer than what the
walk would accept there is no order. The due dates that make the order are part of what is walked over. The slowest
device alone would say nothing about most moves, as they leave it as it is: all devices count, the slowest most.

Sources: AdaPtis (arXiv 2509.23722), which tunes cut, placement and order in turn; simulated annealing (Kirkpatrick,
Gelatt, Vecchi 1983).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.certificate.instance import alike
from raypipe.plan.joint.arrangement import Arrangement
from raypipe.plan.joint.least_step import LeastStep, annealed, seed_of
from raypipe.plan.joint.orders_of import Ordered, OrdersOf
from raypipe.search.lists.chains import Chains
from raypipe.search.lists.priorities import PACES, Pace

KEPT = 5
"""Arrangements that are handed on: the best, and the most promising by their steps and their bounds together."""
OPENING = 0.15
"""Share of the budget for the first arrangements."""
HOT, COLD = 0.008, 2e-4
"""First and last temperature, as shares of the step."""
SMOOTH = 80.0
"""Power of the mean over devices' times in an order."""
BORDERS = 0.4
"""Share of the moves that move borders; the others put stages elsewhere, or divide or join them."""
SLOWEST = 0.25
"""Share of the moves that are of a stage of the device that is last."""
OTHER = 0.3
"""How often a move is also measured with other due dates."""
DRAWN = 2000
"""Moves that are drawn before the budget is looked at again."""
SHORTEN = 100
"""Moves of tabu search on what is handed on."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of the model's arrangements without an order."""

    devices: int
    most_stages: int
    least: LeastStep


@cache
def load_walk() -> None:
    """Load the kernels of the walk before its budget begins: half a second in a process, twenty the first time."""
    from raypipe.plan.joint import walk_kernel as kernel

    rng, one = random.Random(0), np.ones((1, 1))
    least = LeastStep(alike((1.0,), (1.0,), (1.0,), 1, 1))
    a = annealed(least, Arrangement((0,), (0,), 1), 1, 1, rng)
    starts, row = a.arrays(1)
    kernel.promising(least.numbers, starts, row, 1, 1, 0.5, 0, 0.5, 1.0, 1.0, 1, starts, row, seed_of(rng))
    tables = kernel.Tables(
        np.ones((1, 2, 1, 3)), np.zeros((1, 2), np.bool_), np.ones((1, 2, 5)), np.ones((1, 1), np.bool_),
        np.ones((1, 1, 1)), np.full(1, np.inf),
    )  # fmt: skip
    kernel.unknown(tables, starts, row, 1)
    kernel.stages(tables, starts, row, 1, 1)
    ends, _ = Chains(1).ends(row, np.ones((1, 3)), np.ones((1, 2)), one[0], one[0], np.array(PACES))
    kernel.shortest(ends, SMOOTH)
    least.smooth(a)


@dataclass(slots=True)
class Place:
    """Where a walk is."""

    starts: NDArray[np.int64]
    row: NDArray[np.int64]
    count: int
    pace: Pace
    mean: float
    value: float
    slowest: int
    """The device that is last in the order."""


class Walk:
    """A walk over arrangements and due dates, and the shortest orders on it."""

    def __init__(self, orders: OrdersOf, hints: Hints, rng: random.Random) -> None:
        self.orders, self.hints, self.rng = orders, hints, rng
        self.model, self.chains = orders.model, Chains(orders.model.microbatches)
        self.seed = seed_of(rng)
        self.found: dict[Arrangement, tuple[float, Pace]] = {}
        """Arrangements with short orders: their length, and their due dates."""

    def measured(
        self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int, paces: list[Pace]
    ) -> Place | None:  # fmt: skip
        """The best of some orders of an arrangement; None where nothing fits."""
        from raypipe.plan.joint.walk_kernel import shortest

        x = self.model.stages(starts, row, count)
        if x is None:
            return None
        ends, spans = self.chains.ends(
            row[:count].copy(), x.times, x.sizes, x.lag, x.cap, np.array(paces, np.float64), x.frozen
        )
        best, mean, value, slowest = shortest(ends if self.orders.objective == "makespan" else spans, SMOOTH)
        if mean == np.inf:
            return None
        place = Place(starts.copy(), row.copy(), count, paces[best], mean, value, slowest)
        self._keep(place)
        return place

    def begin(self, firsts: Iterable[Arrangement], until: float) -> Place | None:
        """The best of some arrangements."""
        best: Place | None = None
        for a in firsts:
            if best is not None and self.orders.budget.left < until:
                break
            place = self.measured(*a.arrays(self.hints.most_stages), len(a.row), list(PACES))
            if place is not None and (best is None or place.mean < best.mean):
                best = place
        return best

    def run(self, here: Place, goal: float) -> None:
        """Walk until the budget is spent, ever colder, or until an order is as short as the goal."""
        from raypipe.plan.joint.walk_kernel import promising

        budget, hints = self.orders.budget, self.hints
        starts, row = here.starts.copy(), here.row.copy()
        most = budget.left
        while (left := budget.left) > 0 and here.value > goal * (1 + 1e-9):
            heat = HOT * (COLD / HOT) ** (1 - left / most)
            count, limit = promising(
                hints.least.numbers, here.starts, here.row, here.count, hints.most_stages, BORDERS, here.slowest,
                SLOWEST, here.mean, heat, DRAWN, starts, row, self.seed,
            )  # fmt: skip
            if count:
                paces = [here.pace, self._changed(here.pace)] if self.rng.random() < OTHER else [here.pace]
                place = self.measured(starts, row, count, paces)
                if place is not None and place.mean < limit:
                    here = place

    def _changed(self, pace: Pace) -> Pace:
        """Other due dates, mostly near these."""
        rng = self.rng
        if rng.random() < 0.3:
            return rng.choice(PACES)
        which = rng.randrange(5)
        if which == 0:
            return pace._replace(ahead=max(0.0, pace.ahead + rng.gauss(0, 0.5)))
        if which == 1:
            return pace._replace(back=max(0.0, pace.back + rng.gauss(0, 0.5)))
        if which == 2:
            return pace._replace(lead=max(-2.0, pace.lead + rng.gauss(0, 1)))
        if which == 3:
            return pace._replace(wait=max(0.1, pace.wait * 2 ** rng.gauss(0, 1)))
        return pace._replace(patience=rng.choice((0.0, 0.0, 0.25, 0.5, 1.0)))

    def _keep(self, place: Place) -> None:
        if len(self.found) == KEPT and place.value >= max(value for value, _ in self.found.values()):
            return
        a = Arrangement.of(place.starts, place.row, place.count, self.hints.least.i.layers)
        if a in self.found and self.found[a][0] <= place.value:
            return
        self.found[a] = place.value, place.pace
        if len(self.found) > KEPT:
            lead, least = min(self.found, key=self._value), self.hints.least
            del self.found[max((a for a in self.found if a != lead), key=lambda a: self._value(a) + least.of(a))]

    def _value(self, a: Arrangement) -> float:
        return self.found[a][0]


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
    best: dict[Arrangement, Ordered] = {}
    budget, least = orders.budget, hints.least

    def shortest() -> float:
        return min((one.value for one in best.values()), default=float("inf"))

    def done() -> bool:
        return budget.left <= 0 or shortest() <= goal * (1 + 1e-9)

    firsts = list(dict.fromkeys(firsts))
    after_opening = (1 - OPENING) * budget.seconds
    for a in firsts:
        if done() or least.of(a) >= shortest() or (best and budget.left < after_opening):
            continue
        one = orders.of(a, first=not best)
        if one is not None:
            best[a] = one
    walk = Walk(orders, hints, rng)
    if not done() or not best:
        here = walk.begin(firsts, after_opening - OPENING * budget.seconds)
        if here is not None:
            walk.run(here, goal)
    for a, (value, pace) in walk.found.items():
        made = orders.by_due_dates(a, pace) if a not in best or value < best[a].value else None
        if made is not None:
            best[a] = made
    lead = sorted(best.values(), key=lambda one: one.value)[:1]
    others = sorted(best.values(), key=lambda one: one.value + least.of(one.arrangement))
    kept = (lead + [one for one in others if one is not lead[0]])[:KEPT] if lead else []
    return sorted((orders.shorter(one, SHORTEN, goal) for one in kept), key=lambda one: one.value)
