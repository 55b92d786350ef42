"""Which stages recompute: moves over the choice of stages, around the search for an order.

Only the early rule is searched: an R that may run from its own forward on can also run late, so every order of the
late rule is an order of the early one that ends no later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from raypipe.auto.bounds import busiest, lower_bound
from raypipe.auto.problem import build
from raypipe.auto.rounds import Objective
from raypipe.auto.search import Found, search
from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, StageGraph


def search_recompute(
    placement: Sequence[Sequence[int]], microbatches: int, costs: CostTable, *,
    graph: StageGraph | None = None, memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan", split: bool = True, budget_s: float = 5.0, seed: int = 0,
) -> Found:  # fmt: skip
    """Find a short order together with the stages that recompute.

    From all stages recomputing (least memory), give up one stage's recomputation at a time, the one that helps most,
    until none helps; a choice whose bound is no better than what is found isn't searched. The bound of the result
    holds for every choice of stages: no recomputation at all, and no memory limit.

    Source: Lai et al. 2022 (Merak), sections 3.3 and 3.4; with F = R = 1, BW = 2 and one activation a device this finds
    the shifted critical path, 4N + 3(D - 2).

    Args:
        placement, microbatches, costs, graph, memory_limit, objective, split, seed: as in ``search``.
        budget_s: seconds for all choices together.

    Raises:
        ScheduleError: as ``search``.
    """
    began = time.monotonic()
    stages = len(placement[0])

    def problem_bound(chosen: frozenset[int], limit: float | Sequence[float] | None) -> float:
        p = build(
            placement, microbatches, costs, graph=graph, memory_limit=limit, split=split, recompute=chosen,
            rules=Rules(),
        )  # fmt: skip
        return lower_bound(p) if objective == "makespan" else busiest(p)

    def order(chosen: frozenset[int], share: float) -> Found:
        left = began + budget_s - time.monotonic()
        return search(
            placement, microbatches, costs, graph=graph, memory_limit=memory_limit, objective=objective, split=split,
            recompute=chosen, budget_s=max(0.01, left * share), seed=seed,
        )  # fmt: skip

    chosen = frozenset(range(stages))
    best = order(chosen, 0.2)
    while time.monotonic() < began + budget_s:
        options = []
        for stage in sorted(chosen):
            fewer = chosen - {stage}
            try:
                bound = problem_bound(fewer, memory_limit)
            except ScheduleError:  # that memory does not hold even one micro-batch then
                continue
            if bound < best.value * (1 - 1e-9):
                options.append((bound, stage, fewer))
        improved = None
        for k, (bound, _, fewer) in enumerate(sorted(options, key=lambda o: o[:2])):
            if bound >= best.value * (1 - 1e-9):
                break
            found = order(fewer, 0.5 / (len(options) - k))
            if found.value < best.value * (1 - 1e-9):
                best, improved = found, fewer
        if improved is None:
            break
        chosen = improved
    return replace(
        best, bound=min(best.value, problem_bound(frozenset(), None)), seconds=time.monotonic() - began
    )  # fmt: skip
