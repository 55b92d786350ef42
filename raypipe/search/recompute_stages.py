"""Which stages recompute: moves over the choice of stages, around the search for an order.

Only the early rule is searched: an R that may run from its own forward on can also run late, so every order of the
late rule is an order of the early one that ends no later. When each R runs is up to the search for an order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import StageGraph
from raypipe.search.budget import Budget
from raypipe.search.objective import Measure, Objective
from raypipe.search.problem import build
from raypipe.search.search import Found, default_budget, search

_ALL_UP_TO = 6
"""Stages up to which every choice of them is looked at."""


def search_recompute(
    placement: Sequence[Sequence[int]], microbatches: int, costs: CostTable, *,
    graph: StageGraph | None = None, memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan", split: bool = True, freed_by_b: float = 0.0, budget_s: float | None = None,
    seed: int = 0,
) -> Found:  # fmt: skip
    """Find a short order together with the stages that recompute.

    First all stages (least memory), all but the last one (Merak's), and none: with these, no schedule that has a name
    is shorter. Then, up to six stages, every choice, the one with the least bound first. Of more stages: from the best
    of the three, change one stage at a time, the one that helps most, until none helps. A choice whose bound is no
    better than what is found isn't searched.

    Source: Lai et al. 2022 (Merak), sections 3.3 and 3.4; with F = R = 1, BW = 2 and one activation a device this finds
    the shifted critical path, 4N + 3(D - 2).

    Args:
        placement, microbatches, costs, graph, memory_limit, objective, split, freed_by_b, seed: as in ``search``.
        budget_s: seconds of wall time for all choices together. Default: as much processor time as two searches get.

    Returns:
        The best order; its bound holds for every choice of stages. For more than six stages that is the bound without
        any recomputation or memory limit.

    Raises:
        ScheduleError: as ``search``, if even with every stage recomputing no order keeps the memory limit.
    """
    budget = Budget(0.0, wall=budget_s is not None)
    stages = len(placement[0])
    everything = frozenset(range(stages))

    def bound_of(chosen: frozenset[int], limit: float | Sequence[float] | None) -> float:
        """Infinite where one micro-batch needs more memory than there is."""
        try:
            p = build(
                placement, microbatches, costs, graph=graph, memory_limit=limit, split=split, recompute=chosen,
                freed_by_b=freed_by_b,
            )  # fmt: skip
        except ScheduleError:
            return float("inf")
        return Measure(p, costs, objective).bound()

    best: Found | None = None
    chosen = everything

    def shorter(option: frozenset[int], share: float) -> bool:
        nonlocal best, chosen
        found = search(
            placement, microbatches, costs, graph=graph, memory_limit=memory_limit, objective=objective, split=split,
            recompute=option, freed_by_b=freed_by_b, budget=budget.part(share), seed=seed,
        )  # fmt: skip
        if best is not None and found.value >= best.value * (1 - 1e-9):
            return False
        best, chosen = found, option
        return True

    tasks = (4 if split else 3) * stages * microbatches
    budget.seconds = 2 * default_budget(tasks) if budget_s is None else budget_s
    starts = [(bound_of(s, memory_limit), sorted(s)) for s in (everything - {stages - 1}, frozenset[int]())]
    for bound, option in sorted(starts):
        if bound < (float("inf") if best is None else best.value * (1 - 1e-9)):
            with contextlib.suppress(ScheduleError):  # no order was found, where all stages recomputing may leave one
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
