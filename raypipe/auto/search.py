"""The search: many constructive orders, then the best of them shortened along their critical paths, until the budget
is spent or a bound proves that nothing is shorter.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from raypipe.auto import bounds
from raypipe.auto.listing import Layout, Listed, Setting, list_schedule
from raypipe.auto.problem import Problem, Words, build
from raypipe.auto.seeds import published
from raypipe.auto.settings import portfolio, shaken
from raypipe.auto.tabu import improve
from raypipe.auto.timed import Timed
from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.collector import no_collection
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, Schedule, StageGraph
from raypipe.simulate.period import period

Objective = Literal["makespan", "span", "period"]
"""What is made small: time 0 to the last end; the longest device's first start to last end; steady time per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order of a search, with the proof beside it."""

    schedule: Schedule
    value: float
    """The objective of ``schedule``, in the cost table's unit."""
    makespan: float
    bound: float
    """No order within the same memory has a smaller value."""
    seconds: float
    """Time of the search."""
    tried: int
    """Orders that were built whole; moves of the local search not counted."""

    @property
    def gap(self) -> float:
        """How much longer than the bound at most: 0 is proven optimal, 0.01 is one per cent."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0


def default_budget(tasks: int) -> float:
    """Seconds that a search of this many tasks gets: 2.3 at 16 x 64, 14 at 64 x 256."""
    return 1.5 + tasks / 4000


@no_collection()
def search(
    placement: Sequence[Sequence[int]], microbatches: int, costs: CostTable, *,
    graph: StageGraph | None = None, memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan", split: bool = True, rules: Rules | None = None,
    recompute: Collection[int] = (), freed_by_b: float = 0.0, budget_s: float | None = None, seed: int = 0,
    starts: Sequence[Schedule] = (),
) -> Found:  # fmt: skip
    """Find a short order for a placement.

    Args:
        placement: per replica, the device of each stage; see ``placements`` for those with a name.
        microbatches: of the step, over all replicas; replica r takes those that are r modulo the replicas.
        costs: one value per stage, and the latency between devices.
        graph: which stage feeds which; default a chain.
        memory_limit: activations a device may hold, in units of one stage's for one micro-batch: one number, or one
            per device. Default no limit.
        objective: see ``Objective``. Span and period are searched by construction only.
        split: B and W as tasks of their own; else the joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations after F and rebuild them by R.
        freed_by_b: share of an activation that dies with B; the rest with W.
        budget_s: seconds of wall time; default ``default_budget``. The best order so far counts at any time.
        seed: of the random choices.
        starts: orders of the same tasks to begin with, say the running one when costs were measured anew.

    Raises:
        ScheduleError: costs for another number of stages, an unknown objective, a memory limit that no order keeps.
    """
    if objective not in get_args(Objective):
        raise ScheduleError("objective", f'"{objective}" is unknown', nearest(objective, get_args(Objective)))
    began = time.monotonic()
    p = build(
        placement, microbatches, costs, graph=graph, memory_limit=memory_limit, split=split, rules=rules,
        recompute=recompute, freed_by_b=freed_by_b,
    )  # fmt: skip
    budget = default_budget(p.tasks) if budget_s is None else budget_s
    run = _Search(p, costs, objective, began, began + budget, random.Random(seed))
    for schedule in starts:
        words = p.words(schedule)
        if words is not None and p.fits(words):
            run.offer_words(words)
    run.construct()
    run.shorten()
    words, value = run.result()
    state = Timed(p)
    state.load(words)
    return Found(
        schedule=p.schedule(words), value=value, makespan=state.makespan, bound=run.bound,
        seconds=time.monotonic() - began, tried=run.tried,
    )  # fmt: skip


class _Search:
    """One search under way: the orders found so far, best first."""

    def __init__(
        self, p: Problem, costs: CostTable, objective: Objective, began: float, until: float, rng: random.Random
    ) -> None:
        self.p, self.costs, self.objective, self.began, self.until, self.rng = p, costs, objective, began, until, rng
        self.bound = bounds.lower_bound(p) if objective == "makespan" else bounds.busiest(p)
        self.layout = Layout.of(p)
        self.pool: list[tuple[float, float, int, Words, Setting | None]] = []
        """(value, other value, number, words, setting), kept short."""
        self.tried = 0

    def offer(self, listed: Listed, setting: Setting | None) -> None:
        """Keep an order if it is among the best."""
        self.tried += 1
        values = (listed.makespan, listed.span) if self.objective == "makespan" else (listed.span, listed.makespan)
        if len(self.pool) == _POOL and values >= self.pool[-1][:2]:
            return
        if any(entry[:2] == values and entry[3] == listed.words for entry in self.pool):
            return
        self.pool.append((*values, self.tried, listed.words, setting))
        self.pool.sort(key=lambda e: e[:3])
        del self.pool[_POOL:]

    def offer_words(self, words: Words) -> None:
        """The same for an order that comes without its times."""
        state = Timed(self.p)
        state.load(words)
        span = max(
            (state.end[w[-1]] - state.end[w[0]] + state.time[w[0]] for w in words if w), default=0.0
        )  # fmt: skip
        self.offer(Listed(words, state.makespan, span), None)

    def done(self) -> bool:
        """Proven, or out of time."""
        proven = bool(self.pool) and self.pool[0][0] <= self.bound * (1 + 1e-9)
        return proven or (bool(self.pool) and time.monotonic() >= self.until)

    def construct(self) -> None:
        """Published orders, then the portfolio, for at most the first part of the time."""
        part = self.began + _CONSTRUCT * (self.until - self.began)
        for setting in portfolio(self.p):
            listed = list_schedule(self.layout, setting)
            if listed is not None:
                self.offer(listed, setting)
            if self.done() or (self.pool and time.monotonic() > part):
                break
        if not self.done():
            for words in published(self.p, self.costs):
                self.offer_words(words)
        if not self.pool:
            raise ScheduleError("auto", "no order keeps the memory limit", "raise the memory limit")

    def shorten(self) -> None:
        """Alternate between shaken settings and moves on the critical path, from ever new starts."""
        if self.objective != "makespan":
            while not self.done():
                self._shake()
            return
        used: set[int] = set()
        turn = 0
        while not self.done():
            turn += 1
            fresh = [e for e in self.pool if e[2] not in used]
            for _ in range(0 if self.p.tasks > _LARGE else 20):
                self._shake()
            start = fresh[0] if fresh and turn % 3 else self.pool[0]
            used.add(start[2])
            moves = 200 if turn % 3 else 1000
            words, value = improve(self.p, start[3], self.bound, self.until, self.rng, moves=moves)
            if value < start[0]:
                self.offer_words(words)
                used.add(self.tried)

    def _shake(self) -> None:
        """Try a setting near one of the best."""
        known = [e[4] for e in self.pool if e[4] is not None]
        if not known:
            return
        near = known[min(self.rng.randrange(len(known)), self.rng.randrange(len(known)))]
        setting = shaken(self.p, near, self.rng)
        listed = list_schedule(self.layout, setting)
        if listed is not None:
            self.offer(listed, setting)

    def result(self) -> tuple[Words, float]:
        """The best order and its value; periods are worked out for the best few spans, which bound them from above."""
        if self.objective != "period":
            return self.pool[0][3], self.pool[0][0]
        best: tuple[Words, float] | None = None
        for entry in self.pool[:_PERIODS]:
            value = period(self.p.schedule(entry[3]), self.costs)
            if best is None or value < best[1]:
                best = entry[3], value
            if value <= self.bound * (1 + 1e-9):
                break
        assert best is not None
        return best


_POOL = 24
_CONSTRUCT = 0.35
"""Share of the budget for the portfolio."""
_LARGE = 20_000
"""Tasks from which a list schedule costs as much as many moves."""
_PERIODS = 8
