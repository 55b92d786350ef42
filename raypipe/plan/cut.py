"""Cut a model's layers into contiguous stages so that the slowest is as fast as can be, exactly.

Two dynamic programs: the first finds the least possible time of the slowest stage, the second the most even cut
within it. Each part is one n x n array operation, so that a planner may cut a hundred layers thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import SpecError

Cut = tuple[tuple[int, ...], ...]
"""Per stage, the numbers of its layers."""


def contiguous_split(costs: Sequence[float], parts: int, slowest: float | None = None) -> list[int]:
    """Where parts 1, 2, ... begin, for the smallest largest sum (then the smallest sum of squares) of ``parts`` runs.

    Of equally even cuts the one whose larger parts come late, since early stages hold more micro-batches in flight. No
    part is empty. O(parts * n^2). ``slowest``: the smallest largest sum, where the caller has it from ``bottlenecks``.

    >>> contiguous_split([1, 1, 1, 1, 4], 3)
    [2, 4]
    >>> contiguous_split([1.1] * 8, 3)
    [2, 5]
    """
    runs = _runs(costs)
    slowest = _bottlenecks(runs, parts)[-1] if slowest is None else slowest
    bound = slowest * (1 + 1e-12)  # sums taken in another order may differ by rounding
    squares = np.where(runs <= bound, runs * runs, np.inf)
    n = len(costs)
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    begins: list[NDArray[np.int64]] = []
    for _ in range(parts):
        total = best[:, None] + squares
        # Sums of equal costs differ by rounding, which must not decide: the first of the least is the longest part.
        begin = (total <= total.min(axis=0) * (1 + 1e-9)).argmax(axis=0)
        best = total[begin, np.arange(n + 1)]
        begins.append(begin)
    cuts, end = [], n
    for begin in reversed(begins[1:]):
        end = int(begin[end])
        cuts.append(end)
    return cuts[::-1]


def bottlenecks(costs: Sequence[float], most: int) -> list[float]:
    """Least possible largest sum for 1, 2, ... ``most`` contiguous parts.

    >>> bottlenecks([1, 1, 1, 1, 4], 3)
    [8.0, 4.0, 4.0]
    """
    return _bottlenecks(_runs(costs), most)


def balanced_cut(times: Sequence[float], stages: int, slowest: float | None = None) -> Cut:
    """The layers of each stage, from the time of each layer; ``slowest`` as for ``contiguous_split``.

    Raises:
        SpecError: more stages than layers.
    """
    if not 1 <= stages <= len(times):
        raise SpecError("parallel.stages", f"{stages} stages for {len(times)} layers", f"use 1 to {len(times)}")
    edges = [0, *contiguous_split(times, stages, slowest), len(times)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges))


def _runs(costs: Sequence[float]) -> NDArray[np.float64]:
    """``runs[i, j]``: sum of the costs i to j-1; infinite where that is no run."""
    total = np.array([0.0, *accumulate(costs)])
    runs: NDArray[np.float64] = total[None, :] - total[:, None]
    runs[np.tril_indices(len(total))] = np.inf
    return runs


def _bottlenecks(runs: NDArray[np.float64], most: int) -> list[float]:
    slowest = np.full(len(runs), np.inf)
    slowest[0] = 0.0
    found = []
    for _ in range(most):
        slowest = np.maximum(slowest[:, None], runs).min(axis=0)
        found.append(float(slowest[-1]))
    return found
