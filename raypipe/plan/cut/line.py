"""One stage a device: the exact deal of pieces to stages, by dynamic programs over (stage, where it ends)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.cut.runs import ROUNDING, Runs, Table


def deal_line(runs: Runs, stages: int) -> list[int] | None:
    """First piece of each stage, for the smallest largest cost and then the smallest sum of squares; None if no deal
    fits the memory.

    O(stages * n^2): the first program finds the bound, the second the most even deal within it.
    """
    fits = [_fitting(runs, stage) for stage in range(stages)]
    slowest = _slowest([np.where(fit, runs.cost, np.inf) for fit in fits])[-1]
    if slowest == np.inf:
        return None
    total, begins = _start(runs.count), []
    for fit in fits:
        allowed = fit & (runs.cost <= slowest * (1 + ROUNDING))
        sums = total[:, None] + np.where(allowed, runs.cost, np.inf) ** 2
        begin = sums.argmin(axis=0)
        total = sums[begin, np.arange(runs.count + 1)]
        begins.append(begin)
    starts, end = [], runs.count
    for begin in reversed(begins):
        end = int(begin[end])
        starts.append(end)
    return starts[::-1]


def bottlenecks(costs: list[float], most: int) -> list[float]:
    """Least possible largest sum for 1, 2, ... ``most`` contiguous parts.

    >>> bottlenecks([1, 1, 1, 1, 4], 3)
    [8.0, 4.0, 4.0]
    """
    return _slowest([Runs.of(costs).cost] * most)


def leanest_line(runs: Runs, stages: int) -> float:
    """Least memory of a device with which some deal fits."""
    return _slowest([need for stage in range(stages) if (need := runs.bytes(stage)) is not None])[-1]


def _fitting(runs: Runs, stage: int) -> NDArray[np.bool_]:
    need = runs.bytes(stage)
    run = np.isfinite(runs.cost)
    return run if need is None else run & (need <= runs.limit)


def _slowest(tables: list[Table]) -> list[float]:
    """Per number of stages, the least possible largest entry of all pieces cut into that many runs."""
    best, found = _start(len(tables[0]) - 1), []
    for table in tables:
        best = np.maximum(best[:, None], table).min(axis=0)
        found.append(float(best[-1]))
    return found


def _start(n: int) -> Table:
    """Nothing is dealt yet: place 0 is reached at no cost."""
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    return best
