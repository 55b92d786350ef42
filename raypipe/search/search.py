"""The search: it builds many orders, then shortens the best of them along their critical paths.

It stops when the budget is spent or when a lower bound proves that no order is shorter.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules, Schedule, StageGraph
from raypipe.search.budget import Budget
from raypipe.search.lists.decode import decode
from raypipe.search.lists.list_scheduling import LaneArrays, Setting, list_schedule
from raypipe.search.objective import Measure, Objective
from raypipe.search.problem import build
from raypipe.search.rounds import Rounds
from raypipe.search.timed_order import TimedOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order that a search found, and a lower bound."""

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
    """Orders that list scheduling built; moves of the local search are not counted."""

    @property
    def gap(self) -> float:
        """Relative gap to the bound: 0 is proven optimal, 0.01 is at most 1 % above the optimum."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0


def default_budget(tasks: int) -> float:
    """Seconds for a search of this many tasks: 2.5 up to 5000 tasks, about 11 at 64 stages x 256 micro-batches."""
    return 2.5 + max(0, tasks - 5000) / 5000


@cache
def load_machine_code() -> None:
    """Load the kernels before a budget begins: half a second in a process's first search, ten on a machine's first."""
    layout = LaneArrays.of(build(((0,),), 1, CostTable.even(1)))
    list_schedule(layout, Setting((0.0,) * len(layout.problem.kind)))
    decode(layout, [0.0] * layout.problem.tasks, 0.0)
    Measure(layout.problem, CostTable.even(1), "makespan").tighter_bound(4.0, 100)


@no_collection()
def search(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    costs: CostTable,
    *,
    graph: StageGraph | None = None,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    split: bool = True,
    rules: Rules | None = None,
    recompute: Collection[int] = (),
    freed_by_b: float = 0.0,
    budget_s: float | None = None,
    enough: float = 0.0,
    seed: int = 0,
    starts: Sequence[Schedule] = (),
    budget: Budget | None = None,
    sizes: Sequence[tuple[float, float]] | None = None,
) -> Found:
    """Find a short order for a placement.

    Args:
        placement: per replica, the device of each stage; see ``placements`` for those with a name.
        microbatches: number of micro-batches in a step, over all replicas; replica r runs those with
            ``id % replicas == r``.
        costs: one value per stage, and the latency between devices.
        graph: which stage feeds which; by default a chain.
        memory_limit: live activations per device, in units of one stage and micro-batch: one number, or one per
            device. By default there is no limit.
        objective: see ``Objective``.
        split: run B and W as separate tasks; otherwise the joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations after F and recompute them in R.
        freed_by_b: share of an activation that B frees; W frees the remainder.
        budget_s: seconds of wall time. Default: ``default_budget`` seconds of CPU time, so that a busy machine takes
            longer but finds the same order.
        enough: stop as soon as the objective is no greater than this.
        seed: seed of the random choices.
        starts: orders of the same tasks to start from, for example the running order when costs were measured again.
        budget: part of an enclosing search's budget; replaces ``budget_s``.
        sizes: per stage, what an activation takes up to its B and up to its W, in ``memory_limit``'s unit; by default 1
            each. With them, ``bound`` leaves memory out.

    Raises:
        ScheduleError: the costs have another number of stages, the objective is unknown, or no order fits the memory
            limit.
    """
    if objective not in get_args(Objective):
        raise ScheduleError("objective", f'"{objective}" is unknown', nearest(objective, get_args(Objective)))
    load_machine_code()
    given = budget
    budget = given or Budget(budget_s or 0.0, wall=budget_s is not None)
    p = build(
        placement,
        microbatches,
        costs,
        graph=graph,
        memory_limit=memory_limit,
        split=split,
        rules=rules,
        recompute=recompute,
        freed_by_b=freed_by_b,
        sizes=sizes,
    )
    if budget_s is None and given is None:
        budget.seconds = default_budget(p.tasks)
    run = Rounds(p, costs, objective, budget, random.Random(seed), enough)
    for schedule in starts:
        orders = p.orders(schedule)
        if orders is not None and p.fits(orders):
            run.start_from(orders)
    run.construct()
    run.tighten()
    run.shorten()
    run.tighten()
    orders, value = run.result()
    state = TimedOrder(p)
    state.load(orders)
    return Found(
        schedule=p.schedule(orders),
        objective=objective,
        value=value,
        makespan=state.makespan,
        bound=run.bound,
        seconds=budget.elapsed,
        tried=run.tried,
    )
