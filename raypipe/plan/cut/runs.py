"""Costs and needs of every run of consecutive pieces: the tables that cutting works on.

Tables are [i, j] for pieces i to j-1, (n+1) x (n+1); infinite where that is no run, since no stage is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
ROUNDING = 1e-12
"""Relative error of a sum: the same numbers added in another order are taken to be equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that pieces need on a device, and how much there is."""

    limit_bytes: float
    """Of one device."""
    weights: Sequence[Mapping[str, float]]
    """Per piece, the bytes of each parameter with its gradient and optimizer state. One that two pieces on a device
    share is held once."""
    kept_bytes: Sequence[float]
    """Per piece, what is kept for the backward of one micro-batch."""
    output_bytes: Sequence[float] = ()
    """Per piece, what a stage that ends with it hands on, and holds until its backward; none if empty."""
    live: Sequence[float]
    """Per stage, how many micro-batches it keeps at once."""


@dataclass(frozen=True)
class Runs:
    """The tables of one problem."""

    costs: tuple[float, ...]
    before: Table
    """[i]: cost of the pieces before i."""
    weights: Table | None
    """Bytes of parameters."""
    kept: Table | None
    """Bytes kept for one micro-batch."""
    live: tuple[float, ...]
    limit: float

    @staticmethod
    def of(costs: Sequence[float], memory: Memory | None = None) -> Runs:
        """The tables of pieces with these costs."""
        tables = (
            (None, None, (), np.inf)
            if memory is None
            else (
                _together(memory.weights),
                _sums(memory.kept_bytes) + _handed_on(memory),
                tuple(memory.live),
                memory.limit_bytes,
            )
        )
        return Runs(tuple(costs), np.array([0.0, *accumulate(costs)]), *tables)

    @cached_property
    def cost(self) -> Table:
        """[i, j]: cost of a run."""
        return _runs(self.before)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.costs)

    def bytes(self, stage: int) -> Table | None:
        """Return what each run needs as this stage; None where memory does not matter."""
        if self.weights is None or self.kept is None:
            return None
        return self.weights + self.live[stage] * self.kept


def _sums(values: Sequence[float]) -> Table:
    return _runs(np.array([0.0, *accumulate(values)]))


def _runs(total: Table) -> Table:
    table: Table = total[None, :] - total[:, None]
    table[np.tril_indices(len(total))] = np.inf
    return table


def _handed_on(memory: Memory) -> Table:
    """Output of each run's last piece, as a row over the ends of runs."""
    return np.array([0.0, *(memory.output_bytes or [0.0] * len(memory.kept_bytes))])


def _together(weights: Sequence[Mapping[str, float]]) -> Table:
    """Bytes of each run's parameters, each counted once."""
    n = len(weights)
    table = np.full((n + 1, n + 1), np.inf)
    for i in range(n):
        seen: set[str] = set()
        held = 0.0
        for j in range(i, n):
            new = weights[j].keys() - seen
            held += sum(weights[j][name] for name in sorted(new))
            seen |= new
            table[i, j + 1] = held
    return table
