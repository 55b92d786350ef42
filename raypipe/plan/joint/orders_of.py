"""The order of an arrangement's tasks: list schedules of many kinds, shortened where they promise something.

Orders by due dates are made, and their due dates improved step by step, tens of thousands a second. A due date says
which of a device's ready tasks runs first (``search.priorities.paced``). How many forwards a stage may run ahead of its
backwards says what memory is left to the device's other stages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.plan.joint.arrangement import Arrangement, Stages
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.budget import Budget
from raypipe.search.chains import Chains
from raypipe.search.list_scheduling import LaneArrays, Listed, list_schedule
from raypipe.search.objective import Measure, Objective
from raypipe.search.order_walk import shortened
from raypipe.search.priorities import PACES, Pace, paced, portfolio
from raypipe.search.problem import DeviceOrders, Problem, build

SMOOTH = 80.0
"""Power of the mean over devices' times in an order."""
TOGETHER = 12
"""Ways that are tried before the best of them is moved to."""
NUDGED = 0.25
"""Share of the stages that may run one forward further ahead, or one less, at a time."""
PACED = 0.4
"""Share of the ways that change due dates; the others change how far stages run ahead."""
PATIENCE = 150
"""Turns without a shorter order after which none is expected."""


class Way(NamedTuple):
    """How an order is made."""

    pace: Pace
    ahead: NDArray[np.float64]
    """Per stage, how many forwards it may run ahead of its backwards; there may be more entries than stages."""


class MeasuredOrder(NamedTuple):
    """An order of an arrangement."""

    way: Way
    mean: float
    """Of all devices' times, the longest counting most: what a search goes by."""
    value: float
    """The objective, in seconds."""
    slowest: int
    """The device that is last."""


@dataclass(slots=True)
class DueDates:
    """Orders for arrangements of one model."""

    microbatches: int
    objective: Objective
    rng: random.Random
    _chains: Chains = field(init=False)

    def __post_init__(self) -> None:
        self._chains = Chains(self.microbatches)

    def best(
        self, row: NDArray[np.int64], x: Stages, ways: Sequence[Way], useless: float = inf
    ) -> MeasuredOrder | None:
        """The best of some orders; None if memory leaves devices waiting in all of them, or none is of use.

        Args:
            row: the device of each stage.
            x: its stages.
            ways: how orders are made.
            useless: orders with this mean or a larger one need not be told apart.
        """
        from raypipe.plan.joint.walk_kernel import shortest

        stages, in_spans = len(row), self.objective != "makespan"
        ends, spans = self._chains.ends(
            row,
            x.times,
            x.sizes,
            x.lag,
            x.cap,
            np.array([way.pace for way in ways]),
            np.array([way.ahead[:stages] for way in ways]),
            x.frozen,
            useless,
            SMOOTH,
            in_spans,
        )
        best, mean, value, slowest = shortest(spans if in_spans else ends, SMOOTH)
        return None if mean == np.inf else MeasuredOrder(ways[best], mean, value, slowest)

    def tuned(
        self, row: NDArray[np.int64], x: Stages, way: Way, budget: Budget, goal: float = 0.0
    ) -> MeasuredOrder | None:
        """The order after changes of its due dates, and of how far stages run ahead, that do not make it longer.

        Args:
            row, x: see ``best``.
            way: where to begin.
            budget: of all of it.
            goal: stop at this value.
        """
        gen = np.random.default_rng(self.rng.getrandbits(63))
        here = self.best(row, x, [way, *(way._replace(pace=pace) for pace in PACES)])
        since = 0
        while here is not None and since < PATIENCE and here.value > goal and budget.left > 0:
            stages, ways = len(row), []
            steps = gen.choice((-1.0, 0.0, 1.0), (TOGETHER, stages), p=(NUDGED / 2, 1 - NUDGED, NUDGED / 2))
            for step in steps:
                if self.rng.random() < PACED:
                    ways.append(here.way._replace(pace=changed(here.way.pace, self.rng)))
                else:
                    ahead = np.clip(here.way.ahead[:stages] + step, 1.0, float(self.microbatches))
                    ways.append(here.way._replace(ahead=ahead))
            there = self.best(row, x, ways, here.mean * (1 + 1e-12))
            since += 1
            if there is not None and there.mean <= here.mean:
                since = since if there.mean > here.mean * (1 - 1e-6) else 0
                here = there
        return here


def changed(pace: Pace, rng: random.Random) -> Pace:
    """Other due dates, mostly near these."""
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
        result = self.due_dates.tuned(row, x, way, self.budget.part(share))
        return None if result is None else self.by_due_dates(a, result.way, x.cap.tolist())

    def _value(self, listed: Listed) -> float:
        return listed.makespan if self.objective == "makespan" else listed.span

    def shorter(self, found: Ordered, tries: int, goal: float = 0.0) -> Ordered:
        """The same arrangement after a walk along the critical path."""
        layout = LaneArrays.of(found.problem)
        measure = Measure(layout, self.model.costs(found.arrangement), self.objective)
        frame = measure.frame(found.orders)
        orders, _ = shortened(layout, found.orders, goal, self.budget, self.rng, tries, frame)
        value = measure.value(orders)
        return replace(found, orders=orders, value=value) if value < found.value else found

    def _settings(self, first: bool, few: int) -> set[int]:
        if first or not self.wins:
            return set(range(FIRST))
        ranked = sorted(self.wins, key=lambda number: -self.wins[number])[:few]
        return {*ranked, self.rng.randrange(SETTINGS)} if self.rng.random() < NEW else set(ranked)
