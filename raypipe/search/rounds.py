"""One search under way: many constructive orders, then rounds of tabu search from ever other starts.

A start is a fresh order of a shaken setting, one of the best found so far, or a cross of two of those. Only one order
of each length is kept among the best: equally long ones are mostly the same order with idle tasks shifted about.
"""

from __future__ import annotations

import itertools
import random

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.search.budget import Budget
from raypipe.search.decode import decode, disturbed
from raypipe.search.list_scheduling import Layout, Listed, Setting, list_schedule
from raypipe.search.objective import Measure, Objective
from raypipe.search.priorities import portfolio, shaken
from raypipe.search.problem import Problem, Words
from raypipe.search.published_orders import published
from raypipe.search.tabu import improve
from raypipe.search.timed_order import Arcs, Timed
from raypipe.search.zero_bubble_heuristic import alternating

_CONSTRUCT = 0.35
"""Share of the budget for the portfolio."""
_LARGE, _PUBLISHED = 5000, 0.5
"""Tasks from which on published orders, too, have but a part of the budget; and the part that is over by then."""
_ELITE = 8
_HOPELESS = 1.3
"""Times the best period that a span may be for its period to be worked out."""
_OPENING, _SHORT, _DEEP = 250, 120, 600
"""Moves of a round from each family of the portfolio, from another start, and from one of the best."""
_SECONDS_PER_TASK = 1e-6
"""Roughly what a move costs, times tasks."""


class Rounds:
    """The orders found so far, and what to try next."""

    def __init__(
        self, p: Problem, costs: CostTable, objective: Objective, budget: Budget, rng: random.Random,
        enough: float = 0.0,
    ) -> None:  # fmt: skip
        self.p, self.costs, self.objective, self.budget, self.rng = p, costs, objective, budget, rng
        self.measure = Measure(p, costs, objective)
        self.bound = self.measure.bound()
        self.goal = max(self.bound, enough) * (1 + 1e-9)
        """Where the search may stop: proven best, or good enough."""
        self.layout, self.arcs = Layout.of(p), Arcs(p)
        self.elite: dict[float, Words] = {}
        """Length -> an order of that length."""
        self.settings: dict[tuple[float, float], Setting] = {}
        """(makespan, span) -> a setting that gives it: different lengths, so different orders."""
        self.families: dict[tuple[float, ...], tuple[float, Words]] = {}
        """Leads of forwards -> the best order of the portfolio with them, and its length."""
        self.tried = 0

    @property
    def best(self) -> float:
        """Length of the best order."""
        return min(self.elite, default=float("inf"))

    def done(self) -> bool:
        """Proven, or out of time."""
        return bool(self.elite) and (self.best <= self.goal or self.budget.left <= 0)

    def keep(self, words: Words, value: float) -> None:
        """Enter an order among the best."""
        self.elite[value] = words
        if len(self.elite) > _ELITE:
            del self.elite[max(self.elite)]

    def start_from(self, words: Words) -> None:
        """Enter an order that comes without its value."""
        self.keep(words, self.measure.value(words))

    def construct(self) -> None:
        """The portfolio, for at most the first part of the time; then published orders, even if the time is over, where
        steps are not large: no search ends with a longer one.
        """
        rest = (1 - _CONSTRUCT) * self.budget.seconds
        last = (1 - _PUBLISHED) * self.budget.seconds
        for setting in portfolio(self.p):
            listed = self._list(setting)
            if listed is not None and listed.makespan < self.families.get(setting.ahead, (float("inf"),))[0]:
                self.families[setting.ahead] = listed.makespan, listed.words
            if self.done() or (self.elite and self.budget.left < rest):
                break
        if self.best > self.goal:
            for words in itertools.chain(published(self.p, self.costs), alternating(self.p)):
                self.start_from(words)
                if self.p.tasks > _LARGE and self.budget.left < last:
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
            self.keep(listed.words, listed.makespan)
        elif self.objective == "span" or listed.span < _HOPELESS * self.best:  # few periods are far below the span
            self.keep(listed.words, listed.span if self.objective == "span" else self.measure.value(listed.words))
        return listed

    def shorten(self) -> None:
        """Rounds until the bound or the end of the time."""
        moves = self.budget.left / (_SECONDS_PER_TASK * self.p.tasks)
        few = moves < 2 * _DEEP  # too large a problem for many starts
        if not few:
            # One start of each family first, good or bad: how far forwards run ahead is what moves change least.
            for _, words in self.families.values():
                if not self.done():
                    self._round(words, min(_OPENING, int(moves / 2 / len(self.families))))
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
                    self._round(listed.words, _SHORT)

    def _round(self, words: Words, moves: int) -> None:
        frame = self.measure.frame(words)
        found, value = improve(self.p, words, self.goal, self.budget, self.rng, moves, frame, self.arcs)
        self.keep(found, value if frame is None else self.measure.value(found))

    def _recreated(self, words: Words) -> Words | None:
        """An order near this one."""
        state = Timed(self.p, None, self.arcs)
        state.load(words)
        starts = [end - time for end, time in zip(state.end, state.time, strict=True)][: self.p.tasks]
        span = state.makespan
        wish = disturbed(self.layout, starts, span, self.rng)
        return decode(self.layout, wish, self.rng.choice((0.0, 0.01 * span, 0.03 * span, float("inf"))))

    def _known(self) -> Setting:
        return self.rng.choice(list(self.settings.values()))

    def _shaken(self) -> Setting:
        """A setting near one of those tried, the better ones more often when nothing follows the listing."""
        if self.objective == "makespan":
            return shaken(self.p, self._known(), self.rng)
        ranked = sorted(self.settings, key=lambda values: values[::-1])[:24]
        near = ranked[min(self.rng.randrange(len(ranked)), self.rng.randrange(len(ranked)))]
        return shaken(self.p, self.settings[near], self.rng)

    def result(self) -> tuple[Words, float]:
        """The best order and its value."""
        return self.elite[self.best], self.best


def cross(p: Problem, one: Words, other: Words, weight: float) -> Words | None:
    """A crossover: each device's tasks sorted by a weighted mean of their start times in two orders.

    The mean of two feasible sets of start times keeps every dependency, so the result can run; only the memory limit
    needs a check. This resembles path relinking (Peng, Lue and Cheng 2015, tabu search with path relinking for the job
    shop). Returns the order between two others, ``weight`` of the way from ``other`` to
    ``one``, or None if it needs more memory.
    """
    mean = [0.0] * p.tasks
    place = [0.0] * p.tasks
    for words, share in ((one, weight), (other, 1.0 - weight)):
        state = Timed(p)
        state.load(words)
        for t in range(p.tasks):
            mean[t] += share * (state.end[t] - state.time[t])
        # Tasks that take no time may start together; their places tell which comes first in both orders.
        for k, t in enumerate(state.topological):
            place[t] += share * k
    found = [sorted(word, key=lambda t: (mean[t], place[t])) for word in one]
    return found if p.fits(found) else None
