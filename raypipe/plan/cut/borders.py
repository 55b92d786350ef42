"""Better cuts by moving the borders between stages: for placements without an exact method, and to even out ties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.cut.runs import ROUNDING, Runs, Table

Groups = Sequence[tuple[int, ...]]
"""The stages of each device."""
Starts = NDArray[np.int64]
CRITERIA = 5
"""Of a cut; the first that differs decides, smaller is better: memory over the limit, the slowest device, the slowest
stage, and the sums of squares over devices and over stages."""


def move_borders(runs: Runs, starts: Sequence[int], groups: Groups) -> list[int]:
    """Move borders, some neighbouring ones at a time, as long as that makes the cut better (``measure``)."""
    best = np.array(starts)
    better: Starts | None = best
    while better is not None:
        best = better
        better = _first_better(runs, best, groups)
    return [int(start) for start in best]


def _first_better(runs: Runs, starts: Starts, groups: Groups) -> Starts | None:
    """The first of all moves that makes the cut better: neighbouring borders by the same power of two."""
    steps = np.array([sign * 2**k for k in range(runs.count.bit_length()) for sign in (1, -1)])
    key = measure(runs, starts[None], groups)
    upto = np.tri(len(starts), dtype=np.int64)  # [last, k]: whether k <= last
    for first in range(1, len(starts)):
        between = upto[first:] - upto[first - 1]
        cuts = starts + (steps[:, None, None] * between).reshape(-1, len(starts))
        cuts = cuts[(np.diff(cuts, axis=1, append=runs.count) > 0).all(axis=1)]  # no stage is empty
        better = np.flatnonzero(_less(measure(runs, cuts, groups), key[0]))
        if len(better):
            return np.asarray(cuts[better[0]])
    return None


def measure(runs: Runs, cuts: Starts, groups: Groups) -> Table:
    """``CRITERIA`` of cuts, one a row; each is the first piece of every stage."""
    edges = np.hstack([cuts, np.full((len(cuts), 1), runs.count)])
    stage = np.diff(runs.before[edges], axis=1)
    held = np.zeros((stage.shape[1], len(groups)))
    for device, stages in enumerate(groups):
        for s in stages:
            held[s, device] += 1.0
    device = stage @ held
    over = np.maximum(needs(runs, cuts, groups) - runs.limit, 0.0).sum(axis=1)
    return np.column_stack(
        [over, device.max(axis=1), stage.max(axis=1), (device**2).sum(axis=1), (stage**2).sum(axis=1)]
    )


def needs(runs: Runs, cuts: Starts, groups: Groups) -> Table:
    """[cut, device]: bytes that the device needs; no devices where memory does not matter."""
    if runs.weights is None or runs.kept is None:
        return np.empty((len(cuts), 0))
    edges = np.hstack([cuts, np.full((len(cuts), 1), runs.count)])
    a, b = edges[:, :-1], edges[:, 1:]
    each = runs.weights[a, b] + np.array(runs.live) * runs.kept[a, b]
    return np.column_stack([each[:, list(stages)].sum(axis=1) for stages in groups])


def _less(found: Table, key: Table) -> NDArray[np.bool_]:
    """Which rows are smaller than the key, differences by rounding left out."""
    apart = np.abs(found - key) > 10 * ROUNDING * np.maximum(np.abs(found), np.abs(key))
    first = apart.argmax(axis=1)
    rows = np.arange(len(found))
    return np.asarray(apart[rows, first] & (found[rows, first] < key[first]))
