"""Detect disturbances of measurements, by the measuring threads' CPU clocks and by measuring twice.

A task of a CPU device computes all the time, so the part of its time in which its thread did not run went to other
processes. What slows down the thread itself (clock frequency, memory traffic of others, a hypervisor) shows only as a
difference between two measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from raypipe.cost.noise import LIMIT
from raypipe.profiling.profiled_steps import Samples, own_seconds


def stolen(found: Iterable[Samples]) -> float:
    """Return the largest share, over devices, of the compute tasks' time in which their thread did not run."""
    worst = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took = (one.times[:, compute, 1] - one.times[:, compute, 0]).sum()
        ran = one.ran[:, compute].sum()
        if np.isfinite(ran) and took > 0:
            worst = max(worst, float(1 - ran / took))
    return worst


def charge(found: Iterable[Samples]) -> float:
    """Return the factor by which compute tasks took longer than their threads ran, as expected in training too.

    A machine's daemons, Ray's among them, take some percent of every core when no core is idle. The factor is limited
    to ``LIMIT``, because more is a disturbance, which is warned of and not expected to last.
    """
    took = ran = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took += float((one.times[:, compute, 1] - one.times[:, compute, 0]).sum())
        ran += float(own_seconds(one)[:, compute].sum())
    return min(took / ran, 1 / (1 - LIMIT)) if ran else 1.0


def drift(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative difference between the two measurements of each pair.

    >>> drift([(1.0, 1.02), (2.0, 1.6)])
    0.25
    """
    return max((max(a, b) / min(a, b) - 1 for a, b in pairs if min(a, b) > 0), default=0.0)


def to_repeat(stolen_by_size: Mapping[int, float], drifted: float) -> list[int]:
    """Return the micro-batch sizes to measure again: the disturbed ones, or all if the machine's speed changed.

    >>> to_repeat({1: 0.02, 4: 0.3, 8: 0.01}, 0.05), to_repeat({1: 0.02, 4: 0.3}, 0.2), to_repeat({1: 0.02}, 0.0)
    ([4], [1, 4], [])
    """
    if drifted > LIMIT:
        return sorted(stolen_by_size)
    return sorted(size for size, share in stolen_by_size.items() if share > LIMIT)
