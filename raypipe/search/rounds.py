"""Tabu search with restarts, after a portfolio of list schedules.

A round starts from a list schedule with perturbed settings, from one of the best orders, from one of these rebuilt, or
from a crossover of two. Of each length only one order is kept among the best, because orders of equal length mostly
differ only in tasks off the critical path.
"""

from __future__ import annotations

import itertools
import random

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.search.budget import Budget
from raypipe.search.lists.decode import decode, disturbed
from raypipe.search.lists.list_scheduling import LaneArrays, Listed, Setting, list_schedule
from raypipe.search.lists.priorities import portfolio, shaken
from raypipe.search.objective import Measure, Objective
from raypipe.search.problem import DeviceOrders, Problem
from raypipe.search.published_orders import published
from raypipe.search.tabu import improve
from raypipe.search.timed_order import Arcs, TimedOrder
from raypipe.search.zero_bubble_heuristic import alternating

_CONSTRUCT = 0.35
"""Share of the budget for the portfolio."""
_LARGE, _PUBLISHED = 5000, 0.5
"""With more tasks than the first, trying published orders stops once the second share of the budget is spent."""
_ELITE = 8
"""Orders kept as starts."""
_HOPELESS = 1.3
"""A list schedule whose span exceeds this many times the best period is not worth computing its period."""
_OPENING, _SHORT, _DEEP = 250, 120, 600
"""Moves per round: from each family of the portfolio, from a new start, and from one of the best orders."""
_STATES = 100_000
"""States by which ``one_device_bound`` may tighten the bound, per second of the budget: some 5 % of it."""
_SECONDS_PER_TASK = 1e-6
"""Approximate seconds of one move, per task of the problem."""


class Rounds:
    """The state of one search: the orders found so far, and the settings that made them."""

    def __init__(
        self,
        p: Problem,
        costs: CostTable,
        objective: Objective,
        budget: Budget,
        rng: random.Random,
        enough: float = 0.0,
    ) -> None:
        self.p, self.costs, self.objective, self.budget, self.rng = p, costs, objective, budget, rng
        self.measure = Measure(p, costs, objective)
        self.bound, self.enough = self.measure.bound(), enough
        self.goal = max(self.bound, enough) * (1 + 1e-9)
        """The search stops at this value: it is proven optimal, or good enough."""
        self.layout, self.arcs = LaneArrays.of(p), Arcs(p)
        self.elite: dict[float, DeviceOrders] = {}
        """Value of the objective -> an order with that value."""
        self.settings: dict[tuple[float, float], Setting] = {}
        """(makespan, span) -> a setting that gives them; different values mean different orders."""
        self.families: dict[tuple[float, ...], tuple[float, DeviceOrders]] = {}
        """``Setting.ahead`` -> (makespan, order) of the shortest order of the portfolio with that setting."""
        self.tried = 0

    @property
    def best(self) -> float:
        """The smallest value found so far."""
        return min(self.elite, default=float("inf"))

    def done(self) -> bool:
        """Return whether the goal is reached or the budget spent."""
        return bool(self.elite) and (self.best <= self.goal or self.budget.left <= 0)

    def keep(self, orders: DeviceOrders, value: float) -> None:
        """Add an order to the best ones, dropping the worst beyond ``_ELITE``."""
        self.elite[value] = orders
        if len(self.elite) > _ELITE:
            del self.elite[max(self.elite)]

    def start_from(self, orders: DeviceOrders) -> None:
        """Evaluate an order and add it to the best ones."""
        self.keep(orders, self.measure.value(orders))

    def construct(self) -> None:
        """Build list schedules for at most ``_CONSTRUCT`` of the budget, then add the published orders.

        Unless the problem is large, all published orders are added even if the budget is spent, so that the result is
        never longer than one of them.

        Raises:
            ScheduleError: no order fits the memory limit.
        """
        after_portfolio = (1 - _CONSTRUCT) * self.budget.seconds
        after_published = (1 - _PUBLISHED) * self.budget.seconds
        for setting in portfolio(self.p):
            listed = self._list(setting)
            if listed is not None and listed.makespan < self.families.get(setting.ahead, (float("inf"),))[0]:
                self.families[setting.ahead] = listed.makespan, listed.orders
            if self.done() or (self.elite and self.budget.left < after_portfolio):
                break
        if self.best > self.goal:
            for orders in itertools.chain(published(self.p, self.costs), alternating(self.p)):
                self.start_from(orders)
                if self.p.tasks > _LARGE and self.budget.left < after_published:
                    break
        if not self.elite:
            raise ScheduleError("auto", "no order keeps the memory limit", "raise the memory limit")

    def _list(self, setting: Setting) -> Listed | None:
        listed = list_schedule(self.layout, setting)
        if listed is None:
            return None
        self.tried += 1
        self.settings.setdefault((listed.makespan, listed.span), setting)
        if self.objective == "makespan":
            self.keep(listed.orders, listed.makespan)
        elif self.objective == "span" or listed.span < _HOPELESS * self.best:  # a period is rarely far below its span
            self.keep(listed.orders, listed.span if self.objective == "span" else self.measure.value(listed.orders))
        return listed

    def tighten(self) -> None:
        """Tighten the bound by what is known of the best order so far, if that is not good enough yet."""
        if self.best > self.goal:
            states = int(_STATES * self.budget.seconds)
            self.bound = max(self.bound, self.measure.tighter_bound(self.best, states))
            self.goal = max(self.bound, self.enough) * (1 + 1e-9)

    def shorten(self) -> None:
        """Run rounds of tabu search until the goal is reached or the budget spent."""
        moves = self.budget.left / (_SECONDS_PER_TASK * self.p.tasks)
        few = moves < 2 * _DEEP  # too large a problem for many starts
        if not few:
            # Start once from each family, good or bad: how far forwards run ahead is what moves change least.
            for _, orders in self.families.values():
                if not self.done():
                    self._round(orders, min(_OPENING, int(moves / 2 / len(self.families))))
        while not self.done():
            draw = self.rng.random()
            if few or draw < 0.25:
                ranked = sorted(self.elite)
                value = ranked[0] if few else self.rng.choice(ranked[:3])
                self._round(self.elite[value], _DEEP)
            elif draw < 0.5 and len(self.elite) > 1:
                a, b = self.rng.sample(sorted(self.elite), 2)
                child = cross(self.p, self.elite[a], self.elite[b], self.rng.uniform(0.2, 0.8))
                if child is not None:
                    self._round(child, _SHORT)
            elif draw < 0.7:
                child = self._recreated(self.elite[self.rng.choice(sorted(self.elite)[:3])])
                if child is not None:
                    self._round(child, _SHORT)
            else:
                listed = self._list(self._shaken() if self.rng.random() < 0.5 else self._known())
                if listed is not None:
                    self._round(listed.orders, _SHORT)

    def _round(self, orders: DeviceOrders, moves: int) -> None:
        frame = self.measure.frame(orders)
        found, value = improve(self.p, orders, self.goal, self.budget, self.rng, moves, frame, self.arcs)
        self.keep(found, value if frame is None else self.measure.value(found))

    def _recreated(self, orders: DeviceOrders) -> DeviceOrders | None:
        """Perturb the start times of an order and decode them; None on a deadlock."""
        state = TimedOrder(self.p, None, self.arcs)
        state.load(orders)
        starts = [end - time for end, time in zip(state.end, state.time, strict=True)][: self.p.tasks]
        span = state.makespan
        wish = disturbed(self.layout, starts, span, self.rng)
        return decode(self.layout, wish, self.rng.choice((0.0, 0.01 * span, 0.03 * span, float("inf"))))

    def _known(self) -> Setting:
        return self.rng.choice(list(self.settings.values()))

    def _shaken(self) -> Setting:
        """Perturb a setting that was tried; for span and period, one of the better settings."""
        if self.objective == "makespan":
            return shaken(self.p, self._known(), self.rng)
        ranked = sorted(self.settings, key=lambda values: values[::-1])[:24]
        near = ranked[min(self.rng.randrange(len(ranked)), self.rng.randrange(len(ranked)))]
        return shaken(self.p, self.settings[near], self.rng)

    def result(self) -> tuple[DeviceOrders, float]:
        """Return the best order and its value."""
        return self.elite[self.best], self.best


def cross(p: Problem, one: DeviceOrders, other: DeviceOrders, weight: float) -> DeviceOrders | None:
    """A crossover: each device's tasks sorted by a weighted mean of their start times in two orders.

    The mean of two feasible sets of start times keeps every dependency, so the result can run; only the memory limit
    needs a check. This resembles path relinking (Peng, Lue and Cheng 2015, tabu search with path relinking for the job
    shop). Returns the order between two others, ``weight`` of the way from ``other`` to
    ``one``, or None if it needs more memory.
    """
    mean = [0.0] * p.tasks
    place = [0.0] * p.tasks
    for words, share in ((one, weight), (other, 1.0 - weight)):
        state = TimedOrder(p)
        state.load(words)
        for t in range(p.tasks):
            mean[t] += share * (state.end[t] - state.time[t])
        # Tasks that take no time may start together; their places tell which comes first in both orders.
        for k, t in enumerate(state.topological):
            place[t] += share * k
    found = [sorted(word, key=lambda t: (mean[t], place[t])) for word in one]
    return found if p.fits(found) else None
