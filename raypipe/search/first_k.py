"""The search for k of reverse first-k, by trying: a step's time is measured, or predicted, for few of all k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BestFirstK:
    """The best k that was tried."""

    k: int
    """Layers whose dW is postponed; 0: the usual backward, which nothing tried was faster than."""
    seconds: float
    """Time of a step with it."""
    tried: dict[int, float]
    """Every k that was tried, and its time."""


def tune_first_k(seconds: Callable[[int], float], most: int, coarse: int = 8, gain: float = 0.0) -> BestFirstK:
    """Find a good k with few trials: evenly spaced ones first, then ever closer ones around the best.

    A step's time falls with k while sums are still exposed and rises when the link starts to idle, with steps where
    layers are uneven; so the neighbourhood of the best evenly spaced k is searched, in steps that halve.

    Args:
        seconds: time of a step with this k; 0 is the usual backward, to which everything is compared.
        most: largest k, as memory allows.
        coarse: evenly spaced values to begin with.
        gain: share by which a step must be faster than the usual one for any k above 0, such as measurements' noise.

    Source: Oh et al. 2022 (OOO backprop), section 5.1: "to find the optimal k, we profile the executions of the
    schedules with multiple k values"; the return to k = 0 is for models that become slower (its section 7.3).
    """
    tried: dict[int, float] = {0: seconds(0)}

    def best() -> int:
        return min(tried, key=lambda k: (tried[k], k))

    def attempt(k: int) -> None:
        if k not in tried and 0 < k <= most:
            tried[k] = seconds(k)

    for n in range(1, coarse + 1):
        attempt(round(n * most / coarse))
    stride = max(1, most // coarse)
    while stride:
        centre = best()
        attempt(centre - stride)
        attempt(centre + stride)
        if best() == centre:
            stride //= 2
    k = best()
    if tried[k] >= tried[0] * (1 - gain):
        k = 0
    return BestFirstK(k, tried[k], tried)
