"""The order of an arrangement's tasks: list schedules of many kinds, shortened where they promise something."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.plan.joint.arrangement import Arrangement
from raypipe.plan.joint.due_dates import DueDates, Way
from raypipe.plan.joint.stage_tables import Stages
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, Listed, list_schedule
from raypipe.search.objective import Measure, Objective
from raypipe.search.priorities import paced, portfolio
from raypipe.search.problem import DeviceOrders, Problem, build
from raypipe.search.tabu import improve

FIRST = 60
"""Settings of the portfolio that are tried on the first arrangements; of later ones those that did best there."""
OPENING = 0.1
"""Share of the budget that one arrangement may take."""
FEW = 4
SETTINGS = 160
NEW = 0.4
"""How often a setting is tried that may not have been before."""


class Model(Protocol):
    """Costs of an arrangement."""

    @property
    def microbatches(self) -> int:
        """Of a step."""

    def costs(self, a: Arrangement) -> CostTable:
        """Seconds of each stage's tasks."""

    def rules(self, a: Arrangement) -> Rules:
        """Which of its stages are frozen."""

    def stages(self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int) -> Stages | None:
        """The stages of an arrangement; None where its weights and one micro-batch do not fit."""


@dataclass(slots=True)
class Ordered:
    """An arrangement with an order of its tasks."""

    arrangement: Arrangement
    problem: Problem
    orders: DeviceOrders
    value: float
    """The objective, in seconds."""
    way: Way | None = None
    """The due dates that it was made by, at first."""


@dataclass(slots=True)
class OrdersOf:
    """Orders for many arrangements of one model: remembers which ways of list scheduling do well."""

    model: Model
    objective: Objective
    budget: Budget
    rng: random.Random
    wins: dict[int, float] = field(default_factory=dict)
    """Number of a setting in the portfolio -> how often, and how lately, it was the best."""
    due_dates: DueDates = field(init=False)

    def __post_init__(self) -> None:
        self.due_dates = DueDates(self.model.microbatches, self.objective, self.rng)

    def problem(self, a: Arrangement, cap: Sequence[float] | None = None) -> Problem | None:
        """The tasks of an arrangement; None if it does not fit. ``cap``: of its devices, if not what fits."""
        stages = self.model.stages(*a.arrays(len(a.row)), len(a.row))
        if stages is None:
            return None
        try:
            return build(
                (a.row,),
                self.model.microbatches,
                self.model.costs(a),
                memory_limit=cap or stages.cap.tolist(),
                sizes=[(whole, waiting) for whole, waiting in stages.sizes.tolist()],
                rules=self.model.rules(a),
            )
        except ScheduleError:  # not even one micro-batch fits
            return None

    def of(
        self, a: Arrangement, first: bool = False, few: int = FEW, cap: Sequence[float] | None = None
    ) -> Ordered | None:
        """The best of some orders; None if nothing fits.

        Args:
            a: the arrangement.
            first: try many ways; else those that did best so far.
            few: how many of these.
            cap: activations that each device may hold, in the unit of ``Stages.cap``; by default all that fit.
        """
        p = self.problem(a, cap)
        if p is None:
            return None
        layout = LaneArrays.of(p)
        best: tuple[float, int, DeviceOrders] | None = None
        wanted = self._settings(first, few)
        began, most = self.budget.left, OPENING * self.budget.seconds
        for number, setting in enumerate(islice(portfolio(p), max(wanted) + 1)):
            if number not in wanted:
                continue
            listed = list_schedule(layout, setting)
            if listed is not None:
                value = self._value(listed)
                if best is None or value < best[0]:
                    best = value, number, listed.orders
            if best is not None and (self.budget.left <= 0 or began - self.budget.left > most):
                break
        if best is None:
            return None
        self.wins = {number: 0.98 * weight for number, weight in self.wins.items()}
        self.wins[best[1]] = self.wins.get(best[1], 0.0) + 1.0
        return Ordered(a, p, best[2], best[0])

    def by_due_dates(self, a: Arrangement, way: Way, cap: Sequence[float] | None = None) -> Ordered | None:
        """The order with these due dates; None if nothing fits. ``cap``: see ``of``."""
        p = self.problem(a, cap)
        if p is None:
            return None
        layout = LaneArrays.of(p)
        ahead = tuple(way.ahead[p.stage[c]] if p.kind[c] == "F" else math.inf for c in range(len(p.kind)))
        listed = list_schedule(layout, replace(paced(layout, way.pace), ahead=ahead))
        return None if listed is None else Ordered(a, p, listed.orders, self._value(listed), way)

    def tuned(self, a: Arrangement, way: Way, share: float, cap: Sequence[float] | None = None) -> Ordered | None:
        """The order after a search for better due dates with a share of the budget; None if nothing fits."""
        row = np.array(a.row)
        x = self.model.stages(*a.arrays(len(row)), len(row))
        if x is None:
            return None
        if cap is not None:
            x = x._replace(cap=np.array(cap, np.float64))
        found = self.due_dates.tuned(row, x, way, self.budget.part(share))
        return None if found is None else self.by_due_dates(a, found.way, x.cap.tolist())

    def _value(self, listed: Listed) -> float:
        return listed.makespan if self.objective == "makespan" else listed.span

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
        return {*ranked, self.rng.randrange(SETTINGS)} if self.rng.random() < NEW else set(ranked)
