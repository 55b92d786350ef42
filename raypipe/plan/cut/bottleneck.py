"""Cut a model's layers into contiguous stages so that the slowest is as fast as can be, exactly.

Two dynamic programs: the first finds the least possible time of the slowest stage, the second the most even cut
within it. Each part is a few array operations, over all runs of layers in the first and only over those that are not
too long in the second, so that a planner may cut hundreds of layers thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from raypipe.errors import SpecError

Times = NDArray[np.float64]
Cut = tuple[tuple[int, ...], ...]
"""Per stage, the numbers of its layers."""


def contiguous_split(costs: Sequence[float], parts: int, slowest: float | None = None) -> list[int]:
    """Where parts 1, 2, ... begin, for the smallest largest sum (then the smallest sum of squares) of ``parts`` runs.

    Of equally even cuts the one whose larger parts come late, since early stages hold more micro-batches in flight. No
    part is empty. O(parts * n^2), or O(parts * n * layers of the longest part) where the caller has ``slowest``, the
    smallest largest sum, from ``bottlenecks``.

    >>> contiguous_split([1, 1, 1, 1, 4], 3)
    [2, 4]
    >>> contiguous_split([1.1] * 8, 3)
    [2, 5]
    """
    total = _prefix(costs)
    slowest = _bottlenecks(total, parts)[-1] if slowest is None else slowest
    begins = _most_even(total, parts, slowest * (1 + 1e-12))  # sums taken in another order may differ by rounding
    n = len(costs)
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
    return _bottlenecks(_prefix(costs), most)


def balanced_cut(times: Sequence[float], stages: int, slowest: float | None = None) -> Cut:
    """The layers of each stage, from the time of each layer; ``slowest`` as for ``contiguous_split``.

    Raises:
        SpecError: more stages than layers.
    """
    if not 1 <= stages <= len(times):
        raise SpecError("parallel.stages", f"{stages} stages for {len(times)} layers", f"use 1 to {len(times)}")
    edges = [0, *contiguous_split(times, stages, slowest), len(times)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges))


def _prefix(costs: Sequence[float]) -> Times:
    """``total[j] - total[i]`` is the sum of the costs i to j-1."""
    return np.array([0.0, *accumulate(costs)])


def _bottlenecks(total: Times, most: int) -> list[float]:
    runs = total[None, :] - total[:, None]
    runs[np.tril_indices(len(total))] = np.inf  # no run
    slowest = np.full(len(total), np.inf)
    slowest[0] = 0.0
    found = []
    for _ in range(most):
        slowest = np.maximum(slowest[:, None], runs).min(axis=0)
        found.append(float(slowest[-1]))
    return found


def _most_even(total: Times, parts: int, bound: float) -> list[NDArray[np.int64]]:
    """Per part, where it begins if it ends before cost j; of cuts without a sum above ``bound`` the most even one.

    A part that ends at j begins at one of the last few costs before: only those sums are looked at, so that many parts
    take no longer than few.
    """
    n = len(total) - 1
    ends = np.arange(n + 1)
    widest = max(1, int((ends - np.searchsorted(total, total - bound * (1 + 1e-12))).max()))
    begin = ends[:, None] - np.arange(widest, 0, -1)[None, :]  # per end, where a part of 1 to ``widest`` costs begins
    runs = np.where(begin >= 0, total[:, None] - total[np.maximum(begin, 0)], np.inf)
    squares = np.where(runs <= bound, runs * runs, np.inf)
    best = np.full(widest + n + 1, np.inf)  # ``widest`` costs before the first that there are not
    best[widest] = 0.0
    begins: list[NDArray[np.int64]] = []
    for _ in range(parts):
        sums = sliding_window_view(best[:-1], widest) + squares
        least = sums.min(axis=1)
        # Sums of equal costs differ by rounding, which must not decide: the first of the least is the longest part.
        first = (sums <= least[:, None] * (1 + 1e-9)).argmax(axis=1)
        best[widest:] = sums[ends, first]
        begins.append(begin[ends, first])
    return begins
