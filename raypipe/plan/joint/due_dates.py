"""Orders of an arrangement by due dates, and due dates improved step by step: tens of thousands of orders a second.

A due date says which of a device's ready tasks runs first (``search.priorities.paced``). How many forwards a
stage may run ahead of its backwards says what memory is left to the device's other stages.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.joint.stage_tables import Stages
from raypipe.search.budget import Budget
from raypipe.search.chains import Chains
from raypipe.search.objective import Objective
from raypipe.search.priorities import PACES, Pace

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
