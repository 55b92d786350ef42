"""One stage a device: the exact cut, by dynamic programs over (stage, where it ends).

The first program finds the least possible cost of the slowest stage, the second the most even cut within it. Each part
is a few array operations, over all runs of pieces in the first and only over those that are not too long in the second,
so that a planner may cut hundreds of layers thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from raypipe.plan.cut.runs import ROUNDING, Runs, Table


def cut_line(runs: Runs, stages: int, slowest: float | None = None) -> list[int] | None:
    """First piece of each stage, for the smallest largest cost and then the smallest sum of squares; None if no cut
    fits the memory.

    Of equally even cuts the one whose larger stages come late, since early stages hold more micro-batches in flight.
    O(stages * n^2), or O(stages * n * pieces of the longest stage) where the caller has ``slowest``, the smallest
    largest cost, from ``bottlenecks``; memory must not matter then.
    """
    fits = _fitting(runs, stages)
    if slowest is None:
        slowest = _slowest(runs.cost, stages, fits)[-1]
    if slowest == np.inf:
        return None
    starts, end = [], runs.count
    for begin in reversed(_most_even(runs.before, stages, slowest * (1 + ROUNDING), fits)):
        end = int(begin[end])
        starts.append(end)
    return starts[::-1]


def bottlenecks(costs: Sequence[float], most: int) -> list[float]:
    """Least possible largest sum for 1, 2, ... ``most`` contiguous parts.

    >>> bottlenecks([1, 1, 1, 1, 4], 3)
    [8.0, 4.0, 4.0]
    """
    return _slowest(Runs.of(costs).cost, most)


def leanest_line(runs: Runs, stages: int) -> float:
    """Least memory of a device with which some cut fits."""
    best = _start(runs.count)
    for stage in range(stages):
        need = runs.bytes(stage)
        best = np.maximum(best[:, None], np.inf if need is None else need).min(axis=0)
    return float(best[-1])


def _fitting(runs: Runs, stages: int) -> list[NDArray[np.bool_]] | None:
    """Per stage, which runs fit its device; None where memory does not matter."""
    needs = [runs.bytes(stage) for stage in range(stages)]
    return None if runs.weights is None else [need <= runs.limit for need in needs if need is not None]


def _slowest(cost: Table, most: int, fits: list[NDArray[np.bool_]] | None = None) -> list[float]:
    """Per number of stages, the least possible largest cost of all pieces cut into that many runs."""
    best, found = _start(len(cost) - 1), []
    for part in range(most):
        allowed = cost if fits is None else np.where(fits[part], cost, np.inf)
        best = np.maximum(best[:, None], allowed).min(axis=0)
        found.append(float(best[-1]))
    return found


def _most_even(
    before: Table, stages: int, bound: float, fits: list[NDArray[np.bool_]] | None
) -> list[NDArray[np.int64]]:
    """Per stage, where it begins if it ends before piece j; of cuts without a cost above ``bound`` the most even one.

    A stage that ends at j begins at one of the last few pieces before: only those sums are looked at, so that many
    stages take no longer than few.
    """
    n = len(before) - 1
    ends = np.arange(n + 1)
    widest = max(1, int((ends - np.searchsorted(before, before - bound * (1 + ROUNDING))).max()))
    begin = ends[:, None] - np.arange(widest, 0, -1)[None, :]  # per end, where a run of 1 to ``widest`` pieces begins
    first = np.maximum(begin, 0)
    costs = np.where(begin >= 0, before[:, None] - before[first], np.inf)
    squares = np.where(costs <= bound, costs * costs, np.inf)
    best = np.full(widest + n + 1, np.inf)  # ``widest`` pieces before the first that there are not
    best[widest] = 0.0
    begins: list[NDArray[np.int64]] = []
    for stage in range(stages):
        added = squares if fits is None else np.where(fits[stage][first, ends[:, None]], squares, np.inf)
        sums = sliding_window_view(best[:-1], widest) + added
        least = sums.min(axis=1)
        # Sums of equal costs differ by rounding, which must not decide: the first of the least is the longest run.
        chosen = (sums <= least[:, None] * (1 + 1e-9)).argmax(axis=1)
        best[widest:] = sums[ends, chosen]
        begins.append(begin[ends, chosen])
    return begins


def _start(n: int) -> Table:
    """Nothing is cut yet: place 0 is reached at no cost."""
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    return best
