"""How short a step of an arrangement could be, without an order: a few microseconds, where an order takes a hundred.

Per device, the largest of what ``plan/certificate/assigned`` asks of every assignment of layers, here with the stages
and the messages that the arrangement has: work after the first F; forwards of later stages and backwards, which come
later, less the early forwards that fit into memory; the way out, less the weight gradients that fit; and activations'
bytes times seconds. Orders come within a few per cent of it, so that it ranks arrangements, and finds good ones by
simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) before any has an order. The formulae are in ``walk_kernel``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.certificate.instance import Instance
from raypipe.plan.joint.arrangement import Arrangement

WARM, COLD = 0.01, 2e-4
"""First and last temperature, as shares of the step."""


class LeastStep:
    """Bounds on arrangements of one instance."""

    def __init__(self, i: Instance) -> None:
        from raypipe.plan.joint import walk_kernel as kernel

        def sums(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
            return np.array([[*accumulate(row, initial=0.0)] for row in rows])

        weight = [[b - g for b, g in zip(k.backward, k.input_grad, strict=True)] for k in i.kinds]
        self.i = i
        self.numbers = kernel.Numbers(
            sums([k.forward for k in i.kinds]),
            sums([k.input_grad for k in i.kinds]),
            sums(weight),
            sums([i.kept])[0],
            sums([i.full_state])[0],
            np.array(i.kind_of),
            np.array(i.room, np.float64),
            i.layers,
            i.microbatches,
            float(i.message),
            i.barrier,
            any(room < inf for room in i.room),
        )

    def of(self, a: Arrangement) -> float:
        """No order of the arrangement has a shorter step; infinite where its weights do not fit."""
        return float(self._devices(a).max())

    def smooth(self, a: Arrangement) -> float:
        """The bounds of all devices together, the largest counting most."""
        from raypipe.plan.joint import walk_kernel as kernel

        return kernel.smooth(self._devices(a), kernel.SMOOTH)

    def _devices(self, a: Arrangement) -> NDArray[np.float64]:
        """The bound of each device."""
        from raypipe.plan.joint import walk_kernel as kernel

        return kernel.least_steps(self.numbers, np.array(a.starts), np.array(a.row), len(a.row))


def seed_of(rng: random.Random) -> NDArray[np.uint64]:
    """A seed of a kernel's random numbers."""
    return np.array([rng.getrandbits(64)], np.uint64)


def annealed(
    least: LeastStep,
    a: Arrangement,
    most_stages: int,
    tries: int,
    rng: random.Random,
    borders: float = 1.0,
) -> Arrangement:
    """Return the best arrangement on a random walk that grows colder.

    Args:
        least: what is minimised.
        a: where the walk begins.
        most_stages: deepest cut.
        tries: moves that are tried.
        rng: draws the seed of the walk.
        borders: share of the moves that move borders and leave devices as they are.
    """
    from raypipe.plan.joint import walk_kernel as kernel

    starts, row = a.arrays(most_stages)
    count = kernel.anneal(least.numbers, starts, row, len(a.row), most_stages, borders, WARM, COLD, tries, seed_of(rng))
    return Arrangement.of(starts, row, count, a.layers)
