"""Search for the set of stages that recompute, around the search for an order.

Only the early rule is searched, where an R may run at any time after its own forward: every order of the late rule is
also an order of the early rule and ends no later there. The inner search decides when each R runs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays
from raypipe.search.objective import Measure, Objective
from raypipe.search.problem import build
from raypipe.search.search import Found, default_budget, load_machine_code, search

_ALL_UP_TO = 6
"""Up to this many stages, all subsets of them are candidates."""


def search_recompute(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    costs: CostTable,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    split: bool = True,
    budget_s: float | None = None,
) -> Found:
    """Find a short order together with the stages that recompute.

    The search first tries all stages (least memory), all but the last (Merak's choice) and none, so that the result is
    never longer than a named schedule. With up to six stages it then tries every subset, in the order of their lower
    bounds. With more stages it starts from the best of the three and changes one stage at a time, until no change
    helps. A subset whose bound is no better than the best order found is skipped.

    Source: Lai et al. 2022 (Merak), sections 3.3 and 3.4; with F = R = 1, BW = 2 and one activation a device this finds
    the shifted critical path, 4N + 3(D - 2).

    Args:
        placement, microbatches, costs, memory_limit, objective, split: as in ``search``.
        budget_s: seconds of wall time for all choices together. Default: as much processor time as two searches get.

    Returns:
        The best order. Its bound holds for every choice of stages; with more than six stages it is the bound without
        recomputation and without a memory limit.

    Raises:
        ScheduleError: as ``search``; or no order fits the memory limit even if every stage recomputes.
    """
    load_machine_code()
    budget = Budget(0.0, wall=budget_s is not None)
    stages = len(placement[0])
    everything = frozenset(range(stages))

    def bound_of(chosen: frozenset[int], limit: float | Sequence[float] | None) -> float:
        """The lower bound with these stages recomputing; infinite if not even one micro-batch fits."""
        try:
            p = build(placement, microbatches, costs, memory_limit=limit, split=split, recompute=chosen)
        except ScheduleError:
            return float("inf")
        return Measure(LaneArrays.of(p), costs, objective).bound()

    best: Found | None = None
    chosen = everything

    def shorter(option: frozenset[int], share: float) -> bool:
        nonlocal best, chosen
        result = search(
            placement,
            microbatches,
            costs,
            memory_limit=memory_limit,
            objective=objective,
            split=split,
            recompute=option,
            budget=budget.part(share),
        )
        if best is not None and result.value >= best.value * (1 - 1e-9):
            return False
        best, chosen = result, option
        return True

    tasks = (4 if split else 3) * stages * microbatches
    budget.seconds = 2 * default_budget(tasks) if budget_s is None else budget_s
    starts = [(bound_of(s, memory_limit), sorted(s)) for s in (everything - {stages - 1}, frozenset[int]())]
    for bound, option in sorted(starts):
        if bound < (float("inf") if best is None else best.value * (1 - 1e-9)):
            with contextlib.suppress(ScheduleError):  # no order fits; with all stages recomputing one may
                shorter(frozenset(option), 0.15)
    if best is None or bound_of(everything, memory_limit) < best.value * (1 - 1e-9):
        shorter(everything, 0.15)
    assert best is not None
    if stages <= _ALL_UP_TO:
        subsets = [frozenset(s) for k in range(stages + 1) for s in itertools.combinations(range(stages), k)]
        options = sorted((bound_of(s, memory_limit), sorted(s)) for s in subsets)
        least = options[0][0]
    else:
        options, least = [], bound_of(frozenset(), None)
    while budget.left > 0:
        if stages > _ALL_UP_TO:
            near = [chosen ^ {stage} for stage in range(stages)]
            options = sorted((bound_of(s, memory_limit), sorted(s)) for s in near)
        improved = False
        for k, (bound, option) in enumerate(options):
            if bound >= best.value * (1 - 1e-9) or budget.left <= 0:
                break
            with contextlib.suppress(ScheduleError):
                improved = shorter(frozenset(option), max(0.1, 0.5 / (len(options) - k))) or improved
        if not improved or stages <= _ALL_UP_TO:
            break
    return replace(best, bound=min(best.value, least), seconds=budget.elapsed)
