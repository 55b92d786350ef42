"""Simulated annealing over arrangements, each measured by a quick order of its tasks.

An order takes a tenth of a millisecond (``search.chains``), a bound on all orders of an arrangement microseconds
(``LeastStep``). So annealing by bounds comes first, and where an arrangement's bound is already longer than what the
walk would accept there is no order. The due dates that make the order, and how far stages run ahead, are part of what
is walked over; those of the best arrangements are improved further (``orders_of``). The slowest device alone would say
nothing about most moves, as they leave it as it is: all devices count, the slowest most.

Sources: AdaPtis (arXiv 2509.23722), which tunes cut, placement and order in turn; simulated annealing (Kirkpatrick,
Gelatt, Vecchi 1983).

``LeastStep`` is how short a step of an arrangement could be, without an order: per device, the largest of what
``plan/certificate/assigned`` asks of every assignment of layers, here with the stages and the messages that the
arrangement has: work after the first F; forwards of later stages and backwards, which come later, less the early
forwards that fit into memory; the way out, less the weight gradients that fit; and activations' bytes times seconds.
Orders come within a few per cent of it, so that it ranks arrangements, and finds good ones by simulated annealing
(Kirkpatrick, Gelatt, Vecchi 1983) before any has an order. The formulae are in ``walk_kernel``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.certificate.instance import Instance, alike
from raypipe.plan.joint.arrangement import Arrangement
from raypipe.plan.joint.orders_of import NUDGED, SMOOTH, MeasuredOrder, Ordered, OrdersOf, Way, changed
from raypipe.search.chains import Chains
from raypipe.search.order_walk import seed_of
from raypipe.search.priorities import PACES

WARM, HOT, COLD = 0.01, 0.008, 2e-4
"""First temperature of a walk by bounds alone and of one by orders, and the last of both, as shares of the step."""


class LeastStep:
    """Bounds on arrangements of one instance."""

    def __init__(self, i: Instance) -> None:
        from raypipe.plan.joint import walk_kernel as kernel

        def sums(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
            return np.array([[*accumulate(row, initial=0.0)] for row in rows])

        weight = [[b - g for b, g in zip(k.backward, k.input_grad, strict=True)] for k in i.kinds]
        self.i = i
        self.numbers = kernel.Numbers(
            sums([k.forward for k in i.kinds]),
            sums([k.input_grad for k in i.kinds]),
            sums(weight),
            sums([i.kept])[0],
            sums([i.full_state])[0],
            np.array(i.kind_of),
            np.array(i.room, np.float64),
            i.layers,
            i.microbatches,
            float(i.message),
            i.barrier,
            any(room < inf for room in i.room),
        )

    def of(self, a: Arrangement) -> float:
        """No order of the arrangement has a shorter step; infinite where its weights do not fit."""
        return float(self._devices(a).max())

    def smooth(self, a: Arrangement) -> float:
        """The bounds of all devices together, the largest counting most."""
        from raypipe.plan.joint import walk_kernel as kernel

        return kernel.smooth(self._devices(a), kernel.SMOOTH)

    def _devices(self, a: Arrangement) -> NDArray[np.float64]:
        """The bound of each device."""
        from raypipe.plan.joint import walk_kernel as kernel

        return kernel.least_steps(self.numbers, np.array(a.starts), np.array(a.row), len(a.row))


def annealed(
    least: LeastStep,
    a: Arrangement,
    most_stages: int,
    tries: int,
    rng: random.Random,
    borders: float = 1.0,
) -> Arrangement:
    """Return the best arrangement on a random walk that grows colder.

    Args:
        least: what is minimised.
        a: where the walk begins.
        most_stages: deepest cut.
        tries: moves that are tried.
        rng: draws the seed of the walk.
        borders: share of the moves that move borders and leave devices as they are.
    """
    from raypipe.plan.joint import walk_kernel as kernel

    starts, row = a.arrays(most_stages)
    count = kernel.anneal(least.numbers, starts, row, len(a.row), most_stages, borders, WARM, COLD, tries, seed_of(rng))
    return Arrangement.of(starts, row, count, a.layers)


KEPT = 5
"""Arrangements that are handed on: the best, and the most promising by their steps and their bounds together."""
OPENING = 0.15
"""Share of the budget for the first arrangements."""
BORDERS = 0.4
"""Share of the moves that move borders; the others put stages elsewhere, or divide or join them."""
SLOWEST = 0.25
"""Share of the moves that are of a stage of the device that is last."""
OTHER = 0.3
"""How often a move is also measured with other due dates."""
NUDGE = 0.3
"""How often a move is also measured with stages that may run further ahead, or less far."""
TUNING = 0.2
"""Share of the budget for the due dates of what the walk has found."""
DRAWN = 2000
"""Moves that are drawn before the budget is looked at again."""
SHORTEN = 6000
"""Moves along the critical path that are tried on what is handed on."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Bounds and measures of the model's arrangements without an order."""

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
    kernel.promising(
        least.numbers, starts, row, one[0], 1, 1, 0.5, 0, 0.5, 1.0, 1.0, 1, starts, row, one[0], seed_of(rng)
    )
    kernel.nudged(one[0], 1, 1, 1.0, seed_of(rng))
    tables = kernel.Tables(
        np.ones((1, 2, 1, 3)),
        np.zeros((1, 2), np.bool_),
        np.ones((1, 2, 5)),
        np.ones((1, 1), np.bool_),
        np.ones((1, 1, 1)),
        np.full(1, np.inf),
    )
    kernel.unknown(tables, starts, row, 1)
    kernel.stages(tables, starts, row, 1, 1)
    ends, _ = Chains(1).ends(
        row, np.ones((1, 3)), np.ones((1, 2)), one[0], one[0], np.array(PACES), np.ones((len(PACES), 1))
    )
    kernel.shortest(ends, SMOOTH)
    least.smooth(a)


@dataclass(slots=True)
class WalkPlace:
    """Where a walk is."""

    starts: NDArray[np.int64]
    row: NDArray[np.int64]
    count: int
    order: MeasuredOrder


class Walk:
    """A walk over arrangements and due dates, and the shortest orders on it."""

    def __init__(self, orders: OrdersOf, hints: Hints, rng: random.Random) -> None:
        self.orders, self.hints, self.rng = orders, hints, rng
        self.model, self.seed = orders.model, seed_of(rng)
        self.free = np.full(hints.most_stages, float(orders.model.microbatches))
        """Stages may run ahead as far as memory lets them."""
        self.found: dict[Arrangement, MeasuredOrder] = {}
        """Arrangements with short orders."""

    def measured(
        self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int, ways: list[Way], useless: float = inf
    ) -> WalkPlace | None:
        """The best of some orders of an arrangement; None where nothing fits, or is of use (``DueDates.best``)."""
        x = self.model.stages(starts, row, count)
        order = None if x is None else self.orders.due_dates.best(row[:count].copy(), x, ways, useless)
        if order is None:
            return None
        order = order._replace(way=order.way._replace(ahead=order.way.ahead.copy()))
        place = WalkPlace(starts.copy(), row.copy(), count, order)
        self._keep(place)
        return place

    def begin(self, firsts: Iterable[Arrangement], until: float) -> WalkPlace | None:
        """The best of some arrangements."""
        best: WalkPlace | None = None
        for a in firsts:
            if best is not None and self.orders.budget.left < until:
                break
            ways = [Way(pace, self.free) for pace in PACES]
            place = self.measured(*a.arrays(self.hints.most_stages), len(a.row), ways)
            if place is not None and (best is None or place.order.mean < best.order.mean):
                best = place
        return best

    def run(self, here: WalkPlace, goal: float, until: float) -> None:
        """Walk until so many seconds of the budget are left, ever colder, or until an order is as short as the goal."""
        from raypipe.plan.joint.walk_kernel import nudged, promising

        budget, hints, most_ahead = self.orders.budget, self.hints, self.model.microbatches
        starts, row, ahead = here.starts.copy(), here.row.copy(), self.free.copy()
        most = budget.left - until
        while (left := budget.left - until) > 0 and here.order.value > goal * (1 + 1e-9):
            pace, known = here.order.way
            heat = HOT * (COLD / HOT) ** (1 - left / most)
            count, limit = promising(
                hints.least.numbers,
                here.starts,
                here.row,
                known,
                here.count,
                hints.most_stages,
                BORDERS,
                here.order.slowest,
                SLOWEST,
                here.order.mean,
                heat,
                DRAWN,
                starts,
                row,
                ahead,
                self.seed,
            )
            if count:
                ways = [Way(pace, ahead)]
                draw = self.rng.random()
                if draw < OTHER:
                    ways.append(Way(changed(pace, self.rng), ahead))
                elif draw < OTHER + NUDGE:
                    ways.append(Way(pace, nudged(ahead, count, most_ahead, NUDGED, self.seed)))
                place = self.measured(starts, row, count, ways, limit)
                if place is not None and place.order.mean < limit:
                    here = place

    def _keep(self, place: WalkPlace) -> None:
        value = place.order.value
        if len(self.found) == KEPT and value >= max(order.value for order in self.found.values()):
            return
        a = Arrangement.of(place.starts, place.row, place.count, self.hints.least.i.layers)
        if a in self.found and self.found[a].value <= value:
            return
        self.found[a] = place.order
        if len(self.found) > KEPT:
            lead, least = min(self.found, key=self._value), self.hints.least
            del self.found[max((a for a in self.found if a != lead), key=lambda a: self._value(a) + least.of(a))]

    def _value(self, a: Arrangement) -> float:
        return self.found[a].value


def arranged(
    orders: OrdersOf, firsts: Iterable[Arrangement], hints: Hints, goal: float, rng: random.Random
) -> list[Ordered]:
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
            walk.run(here, goal, TUNING * budget.seconds)
    for k, (a, order) in enumerate(walk.found.items()):
        made = orders.tuned(a, order.way, 1 / (len(walk.found) - k))
        if made is not None and (a not in best or made.value < best[a].value):
            best[a] = made
    lead = sorted(best.values(), key=lambda one: one.value)[:1]
    others = sorted(best.values(), key=lambda one: one.value + least.of(one.arrangement))
    kept = (lead + [one for one in others if one is not lead[0]])[:KEPT] if lead else []
    return sorted((orders.shorter(one, SHORTEN, goal) for one in kept), key=lambda one: one.value)
