"""The search: many constructive orders, then the best of them shortened along their critical paths, until the budget
is spent or a bound proves that nothing is shorter.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules, Schedule, StageGraph
from raypipe.search.budget import Budget
from raypipe.search.objective import Objective
from raypipe.search.problem import build
from raypipe.search.rounds import Rounds
from raypipe.search.timed_order import Timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order of a search, with the proof beside it."""

    schedule: Schedule
    objective: Objective
    value: float
    """The objective of ``schedule``, in the cost table's unit."""
    makespan: float
    bound: float
    """No order within the same memory has a smaller value."""
    seconds: float
    """Wall time of the search."""
    tried: int
    """Orders that were built whole; moves of the local search not counted."""

    @property
    def gap(self) -> float:
        """How much longer than the bound at most: 0 is proven optimal, 0.01 is one per cent."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0


def default_budget(tasks: int) -> float:
    """Seconds that a search of this many tasks gets: 2.5 up to 16 x 64, 11 at 64 x 256."""
    return 2.5 + max(0, tasks - 5000) / 5000


@no_collection()
def search(
    placement: Sequence[Sequence[int]], microbatches: int, costs: CostTable, *,
    graph: StageGraph | None = None, memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan", split: bool = True, rules: Rules | None = None,
    recompute: Collection[int] = (), freed_by_b: float = 0.0, budget_s: float | None = None, enough: float = 0.0,
    seed: int = 0, starts: Sequence[Schedule] = (), budget: Budget | None = None,
) -> Found:  # fmt: skip
    """Find a short order for a placement.

    Args:
        placement: per replica, the device of each stage; see ``placements`` for those with a name.
        microbatches: of the step, over all replicas; replica r takes those that are r modulo the replicas.
        costs: one value per stage, and the latency between devices.
        graph: which stage feeds which; default a chain.
        memory_limit: activations a device may hold, in units of one stage's for one micro-batch: one number, or one
            per device. Default no limit.
        objective: see ``Objective``.
        split: B and W as tasks of their own; else the joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations after F and rebuild them by R.
        freed_by_b: share of an activation that dies with B; the rest with W.
        budget_s: seconds of wall time. Default: ``default_budget`` of processor time, so that a busy machine takes
            longer but finds the same. The best order so far counts at any time.
        enough: stop as soon as the objective is no greater than this.
        seed: of the random choices.
        starts: orders of the same tasks to begin with, say the running one when costs were measured anew.
        budget: instead of ``budget_s``, the part of a larger search's.

    Raises:
        ScheduleError: costs for another number of stages, an unknown objective, a memory limit that no order keeps.
    """
    if objective not in get_args(Objective):
        raise ScheduleError("objective", f'"{objective}" is unknown', nearest(objective, get_args(Objective)))
    given = budget
    budget = given or Budget(budget_s or 0.0, wall=budget_s is not None)
    p = build(
        placement, microbatches, costs, graph=graph, memory_limit=memory_limit, split=split, rules=rules,
        recompute=recompute, freed_by_b=freed_by_b,
    )  # fmt: skip
    if budget_s is None and given is None:
        budget.seconds = default_budget(p.tasks)
    run = Rounds(p, costs, objective, budget, random.Random(seed), enough)
    for schedule in starts:
        words = p.words(schedule)
        if words is not None and p.fits(words):
            run.start_from(words)
    run.construct()
    run.shorten()
    words, value = run.result()
    state = Timed(p)
    state.load(words)
    return Found(
        schedule=p.schedule(words), objective=objective, value=value, makespan=state.makespan, bound=run.bound,
        seconds=budget.elapsed, tried=run.tried,
    )  # fmt: skip
