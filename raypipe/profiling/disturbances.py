"""What else the machine did while it was measured: told by the measuring threads' own clocks, and by measuring twice.

A task of a CPU device computes all the time it takes, so what its thread did not run was another process's. What slows
the thread itself down (another clock frequency, somebody else's traffic to memory, a host that gives its guest less)
shows only as a difference between two measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from raypipe.cost.noise import LIMIT
from raypipe.profiling.profiled_steps import Samples, own_seconds


def stolen(found: Iterable[Samples]) -> float:
    """The largest share, over devices, of the time of compute tasks in which their thread did not run."""
    worst = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took = (one.times[:, compute, 1] - one.times[:, compute, 0]).sum()
        ran = one.ran[:, compute].sum()
        if np.isfinite(ran) and took > 0:
            worst = max(worst, float(1 - ran / took))
    return worst


def charge(found: Iterable[Samples]) -> float:
    """By what factor compute tasks took longer than their threads ran for them, as far as that will be so in training.

    A machine's own daemons, Ray's among them, take some hundredths of every core that has nothing idle beside it. More
    than ``LIMIT`` is a disturbance, which is warned of and not expected to go on.
    """
    took = ran = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took += float((one.times[:, compute, 1] - one.times[:, compute, 0]).sum())
        ran += float(own_seconds(one)[:, compute].sum())
    return min(took / ran, 1 / (1 - LIMIT)) if ran else 1.0


def drift(pairs: Iterable[tuple[float, float]]) -> float:
    """The largest relative difference between two measurements of the same thing.

    >>> drift([(1.0, 1.02), (2.0, 1.6)])
    0.25
    """
    return max((max(a, b) / min(a, b) - 1 for a, b in pairs if min(a, b) > 0), default=0.0)


def to_repeat(stolen_by_size: Mapping[int, float], drifted: float) -> list[int]:
    """Micro-batch sizes to measure again: those that were disturbed; all where the machine changed on the way.

    >>> to_repeat({1: 0.02, 4: 0.3, 8: 0.01}, 0.05), to_repeat({1: 0.02, 4: 0.3}, 0.2), to_repeat({1: 0.02}, 0.0)
    ([4], [1, 4], [])
    """
    if drifted > LIMIT:
        return sorted(stolen_by_size)
    return sorted(size for size, share in stolen_by_size.items() if share > LIMIT)
