"""Two stages a device: the exact cut, for stages s and S-1-s together (folded) or s and s + S/2 (a ring of two laps).

Can every device stay within a given cost? Devices are filled one after another; what matters of a filling is how far
each of its two runs has come. The set of such places is followed from device to device, and stays small, because a
place from which the other devices could not take the rest any more is left out. The least cost that works is found by
halving, from a good cut downwards. A run is never empty: that is what forbids keeping the furthest place only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.cut.runs import ROUNDING, Runs, Table

Places = NDArray[np.int64]
UNKNOWN = 1e-9
"""Relative width of what halving leaves open. Each try that succeeds lowers the bound to a cost that a cut has."""


def cut_folded(runs: Runs, starts: Sequence[int]) -> list[int]:
    """The best cut with stages s and S-1-s on one device; ``starts`` is any one that fits the memory, or nothing
    that does if it is empty."""
    return _best(runs, starts, [None])


def cut_ring(runs: Runs, starts: Sequence[int]) -> list[int]:
    """The best cut with stages s and s + S/2 on one device."""
    half = len(starts) // 2
    return _best(runs, starts, range(half, runs.count - half + 1))


def fitting_folded(runs: Runs, stages: int) -> list[int] | None:
    """Some cut that fits the memory; None if there is none."""
    return _any(runs, stages, [None])


def fitting_ring(runs: Runs, stages: int) -> list[int] | None:
    """Some cut that fits the memory; None if there is none."""
    return _any(runs, stages, range(stages // 2, runs.count - stages // 2 + 1))


def _any(runs: Runs, stages: int, middles: Iterable[int | None]) -> list[int] | None:
    everything = float(runs.before[-1])
    tries = (_Try(runs, stages, everything, everything, middle).cut() for middle in middles)
    return next((found for found in tries if found is not None), None)


def _best(runs: Runs, starts: Sequence[int], middles: Iterable[int | None]) -> list[int]:
    """Least cost of a device, then of a stage at that; ``middles`` are where the second lap may begin."""
    middles, stages, best = list(middles), len(starts), list(starts)
    everything = float(runs.before[-1])
    least = max(max(runs.costs), everything / (stages // 2))
    for middle in middles:
        best = _halved(runs, best, middle, least, None)
    cap = _costs(runs, best, folded=middles == [None])[0]
    for middle in middles:
        best = _halved(runs, best, middle, max(runs.costs), cap)
    return best


def _halved(runs: Runs, best: list[int], middle: int | None, least: float, cap: float | None) -> list[int]:
    """A better cut with this middle, if there is one: of devices, or of stages if devices are capped."""
    high, low, first = _costs(runs, best, middle is None)[0 if cap is None else 1], least, True
    while high - low > UNKNOWN * high:
        limit = high * (1 - UNKNOWN) if first else (low + high) / 2
        device, stage = (limit, limit) if cap is None else (cap, limit)
        found = _Try(runs, len(best), device, stage, middle).cut()
        if found is None:
            if first:
                return best
            low = limit
        else:
            best = found
            high = _costs(runs, best, middle is None)[0 if cap is None else 1]
        first = False
    return best


def _costs(runs: Runs, starts: Sequence[int], folded: bool) -> tuple[float, float]:
    """Of the slowest device and of the slowest stage."""
    ends = [*starts[1:], runs.count]
    each = [float(runs.cost[a, b]) for a, b in zip(starts, ends, strict=True)]
    half = len(each) // 2
    others = each[: half - 1 : -1] if folded else each[half:]
    return max(a + b for a, b in zip(each[:half], others, strict=True)), max(each)


@dataclass(frozen=True)
class _Try:
    """A search for a cut within these costs. A state is (first, second): how far the two runs have come."""

    runs: Runs
    stages: int
    device: float
    stage: float
    middle: int | None
    """Where the second lap of a ring begins; None if folded, where the second run comes down from the end."""

    def cut(self) -> list[int] | None:
        """The first piece of each stage; None if there is no such cut."""
        n, half = self.runs.count, self.stages // 2
        reached = [np.array([[0, n if self.middle is None else self.middle]])]
        for number in range(half):
            first, low, high = self.reach(number, reached[-1])
            rows, columns = np.nonzero(low <= high)
            # Mark every second place in low..high for each first place: +1 where a range begins, -1 behind its end.
            marks = np.zeros((n + 1, n + 2), dtype=np.int64)
            np.add.at(marks, (first[columns], low[rows, columns]), 1)
            np.add.at(marks, (first[columns], high[rows, columns] + 1), -1)
            reached.append(np.argwhere(marks.cumsum(axis=1)[:, :-1] > 0))
            if not len(reached[-1]):
                return None
        return self.trace(reached)

    def reach(self, number: int, states: Places) -> tuple[Places, Places, Places]:
        """The first run's next places, and per state and place the second run's lowest and highest next place."""
        runs, n, rest = self.runs, self.runs.count, self.stages // 2 - 1 - number
        places, before, total = np.arange(n + 1), runs.before, runs.before[-1]
        came = states[:, 1][:, None]
        own = runs.cost[states[:, 0]]
        slack = self.device * ROUNDING
        room = np.minimum(self.stage, self.device - own) + slack
        good = (own <= self.stage + slack) & (room >= 0)
        behind = self.device * rest + slack  # what the other devices can still take
        if self.middle is None:
            low = np.searchsorted(before, before[came] - room)
            low = np.maximum(np.maximum(low, places + 2 * rest), self._lowest_that_fits(number, states))
            high = np.minimum(came - 1, np.searchsorted(before, before + behind, side="right") - 1)
            if rest == 0:  # the runs meet
                low, high = np.maximum(low, places), np.minimum(high, places)
        else:
            high = np.searchsorted(before, before[came] + room, side="right") - 1
            high = np.minimum(np.minimum(high, n - rest), self._highest_that_fits(number, states))
            low = np.searchsorted(before, total + before[self.middle] - before - behind)
            low = np.maximum(low, came + 1)
            good &= places <= self.middle - rest
            if rest == 0:
                low = np.maximum(low, n)
                good &= places == self.middle
        return places, low, np.where(good, high, -1)

    def trace(self, reached: list[Places]) -> list[int] | None:
        """From the last state back to the first."""
        firsts, seconds = [], []
        first, second = (int(x) for x in reached[-1][0])
        for number in reversed(range(self.stages // 2)):
            _, low, high = self.reach(number, reached[number])
            from_here = np.flatnonzero((low[:, first] <= second) & (second <= high[:, first]))
            i, came = (int(x) for x in reached[number][from_here[0]])
            seconds.append(second if self.middle is None else came)
            firsts.append(i)
            first, second = i, came
        return [*firsts[::-1], *(seconds if self.middle is None else seconds[::-1])]

    def _lowest_that_fits(self, number: int, states: Places) -> Places | int:
        """[state, j]: the least b so that pieces b up to the second place fit beside pieces up to j."""
        own, other = self._bytes(number, self.stages - 1 - number)
        if own is None or other is None:
            return 0
        # Needs fall as b rises, so in reverse they rise: count those that fit.
        return np.array(
            [t - np.searchsorted(other[:t, t][::-1], self.runs.limit - own[i], side="right") for i, t in states]
        )

    def _highest_that_fits(self, number: int, states: Places) -> Places | int:
        """[state, j]: the greatest e so that pieces from the second place to e - 1 fit beside pieces up to j."""
        own, other = self._bytes(number, number + self.stages // 2)
        if own is None or other is None:
            return self.runs.count
        return np.array(
            [k + np.searchsorted(other[k, k + 1 :], self.runs.limit - own[i], side="right") for i, k in states]
        )

    def _bytes(self, first: int, second: int) -> tuple[Table | None, Table | None]:
        return self.runs.bytes(first), self.runs.bytes(second)
