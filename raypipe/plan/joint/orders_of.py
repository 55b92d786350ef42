"""The order of an arrangement's tasks: list schedules of a few kinds, shortened where they promise something."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from raypipe.errors import ScheduleError
from raypipe.plan.joint.arrangement import Arrangement
from raypipe.plan.joint.least_step import smooth
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.budget import Budget
from raypipe.search.lists.list_scheduling import Layout, list_schedule
from raypipe.search.lists.priorities import PACES, portfolio
from raypipe.search.objective import Measure, Objective
from raypipe.search.problem import DeviceOrders, Problem, build
from raypipe.search.tabu import improve

FIRST = 60
"""Settings of the portfolio that are tried on the first arrangements; of later ones those that did best there."""
OPENING = 0.1
"""Share of the budget that one arrangement may take."""
FEW = 4
SETTINGS = 160
HOPELESS = 1.02
"""Times the limit above which a list schedule says that another one is not worth making."""
NEW = 0.4
SELDOM = 0.15
"""How often a setting is tried that may not have been before: of all where many are tried, else of the paced ones."""


class Model(Protocol):
    """What an arrangement costs."""

    @property
    def microbatches(self) -> int:
        """Of a step."""

    def costs(self, a: Arrangement) -> CostTable:
        """Seconds of each stage's tasks."""

    def rules(self, a: Arrangement) -> Rules:
        """Which of its stages are frozen."""

    def memory(self, a: Arrangement) -> tuple[list[tuple[float, float]], list[float]] | None:
        """Per stage, what a micro-batch's activations take up to its B and from there to its W; per device, what there
        is for them. None where the weights alone do not fit."""


@dataclass(slots=True)
class Ordered:
    """An arrangement with an order of its tasks."""

    arrangement: Arrangement
    problem: Problem
    orders: DeviceOrders
    value: float
    """The objective, in seconds."""
    mean: float = float("inf")
    """The same of a quick order with all devices together, the slowest counting most (``smooth``)."""
    slowest: int | None = None
    """The device that is last in that order."""


@dataclass(slots=True)
class OrdersOf:
    """Orders for many arrangements of one model: remembers which ways of list scheduling do well."""

    model: Model
    objective: Objective
    budget: Budget
    rng: random.Random
    wins: dict[int, float] = field(default_factory=dict)
    """Number of a setting in the portfolio -> how often, and how lately, it was the best."""
    tried: int = 0

    def problem(self, a: Arrangement) -> Problem | None:
        """The tasks of an arrangement; None if it does not fit."""
        memory = self.model.memory(a)
        if memory is None:
            return None
        sizes, limits = memory
        try:
            return build(
                (a.row,), self.model.microbatches, self.model.costs(a), memory_limit=limits, sizes=sizes,
                rules=self.model.rules(a),
            )  # fmt: skip
        except ScheduleError:  # not even one micro-batch fits
            return None

    def of(
        self, a: Arrangement, first: bool = False, few: int = FEW, limit: float = float("inf")
    ) -> Ordered | None:  # fmt: skip
        """A quick order; None if nothing fits.

        Args:
            a: the arrangement.
            first: try many ways; else those that did best so far.
            few: how many of these.
            limit: the mean of interest: where one way comes out far above, no other is tried.
        """
        p = self.problem(a)
        if p is None:
            return None
        layout = Layout.of(p)
        best: tuple[float, int, DeviceOrders, list[float]] | None = None
        wanted = self._settings(first, few)
        began, most = self.budget.left, OPENING * self.budget.seconds
        for number, setting in enumerate(islice(portfolio(p), max(wanted) + 1)):
            if number not in wanted:
                continue
            listed = list_schedule(layout, setting)
            self.tried += 1
            if listed is not None:
                each = listed.ends if self.objective == "makespan" else listed.spans
                value = max(each)
                if best is None or value < best[0]:
                    best = value, number, listed.orders, each
                if smooth(each) > HOPELESS * limit:
                    break
            if best is not None and (self.budget.left <= 0 or began - self.budget.left > most):
                break
        if best is None:
            return None
        self.wins = {number: 0.98 * weight for number, weight in self.wins.items()}
        self.wins[best[1]] = self.wins.get(best[1], 0.0) + 1.0
        return Ordered(a, p, best[2], best[0], smooth(best[3]), max(range(len(best[3])), key=best[3].__getitem__))

    def shorter(self, found: Ordered, moves: int, goal: float = 0.0) -> Ordered:
        """The same arrangement after some moves of tabu search along the critical path."""
        measure = Measure(found.problem, self.model.costs(found.arrangement), self.objective)
        frame = measure.frame(found.orders)
        orders, _ = improve(found.problem, found.orders, goal, self.budget, self.rng, moves, frame)
        value = measure.value(orders)
        return replace(found, orders=orders, value=value) if value < found.value else found

    def _settings(self, first: bool, few: int) -> set[int]:
        if first or not self.wins:
            return set(range(FIRST))
        ranked = sorted(self.wins, key=lambda number: -self.wins[number])[:few]
        if few < FEW:  # the first settings are quickly made; the others cost as much as an order
            return {*ranked, self.rng.randrange(len(PACES))} if self.rng.random() < SELDOM else set(ranked)
        return {*ranked, self.rng.randrange(SETTINGS)} if self.rng.random() < NEW else set(ranked)
