"""The exact cut where a piece costs more on some stages than on others: stages on devices of several kinds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.cut.runs import ROUNDING, Runs, Table


def cut_uneven(
    costs: Sequence[Sequence[float]], fits: Sequence[NDArray[np.bool_]] | None = None
) -> tuple[int, ...] | None:
    """Return the first piece of each stage; None if no cut fits.

    As ``cut_line``: the smallest largest cost of a stage, then the smallest sum of squares, of equal ones that whose
    larger stages come late. O(stages * pieces^2).

    Args:
        costs: per stage, the cost of each piece on its device.
        fits: per stage, for pieces i to j-1 at [i, j] whether they fit its device.

    >>> cut_uneven([[1.0] * 6, [2.0] * 6])
    (0, 4)
    """
    runs = [Runs.of(own).cost for own in costs]
    if fits is not None:
        runs = [np.where(own, run, np.inf) for run, own in zip(runs, fits, strict=True)]
    slowest = _start(len(costs[0]))
    for run in runs:
        slowest = np.maximum(slowest[:, None], run).min(axis=0)
    if slowest[-1] == np.inf:
        return None
    bound = float(slowest[-1]) * (1 + ROUNDING)
    best, begins = _start(len(costs[0])), list[NDArray[np.int64]]()
    for run in runs:
        sums = best[:, None] + np.where(run <= bound, run, np.inf) ** 2
        least = sums.min(axis=0)
        # Rounding must not decide between equal sums: the first of the least is the longest run.
        begins.append((sums <= least * (1 + 1e-9)).argmax(axis=0))
        best = least
    starts, end = list[int](), len(costs[0])
    for begin in reversed(begins):
        end = int(begin[end])
        starts.append(end)
    return tuple(reversed(starts))


def _start(pieces: int) -> Table:
    """Nothing is cut yet: place 0 is reached at no cost."""
    best = np.full(pieces + 1, np.inf)
    best[0] = 0.0
    return best
