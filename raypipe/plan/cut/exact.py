"""Exact cuts, for one stage a device and for two.

Costs and needs of every run of consecutive pieces are tables: [i, j] for pieces i to j-1, (n+1) x (n+1); infinite where
that is no run, since no stage is empty.

**One stage a device** (``cut_line``; ``cut_uneven`` where devices are of several kinds): dynamic programs over (stage,
where it ends). The first finds the least possible cost of the slowest stage, the second the most even cut within it.
Each part is a few array operations, over all runs of pieces in the first and only over those that are not too long in
the second, so that a planner may cut hundreds of layers thousands of times.

**Two stages a device**: stages s and S-1-s together (folded) or s and s + S/2 (a ring of two laps). Can every device
stay within a given cost? Devices are filled one after another; what matters of a filling is how far each of its two
runs has come. The set of such places is followed from device to device, and stays small, because a place from which the
other devices could not take the rest any more is left out. The least cost that works is found by halving, from a good
cut downwards. A run is never empty: that is what forbids keeping the furthest place only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
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


def cut_line(runs: Runs, stages: int, slowest: float | None = None) -> list[int] | None:
    """First piece of each stage, for the smallest largest cost and then the smallest sum of squares; None if no cut
    fits the memory.

    Of equally even cuts the one whose larger stages come late, since early stages hold more micro-batches in flight.
    O(stages * n^2), or O(stages * n * pieces of the longest stage) where the caller has ``slowest``, the smallest
    largest cost, from ``bottlenecks``; memory must not matter then.
    """
    needs = _needs(runs, stages)
    fits = None if needs is None else [need <= runs.limit for need in needs]
    if slowest is None:
        slowest = _slowest(
            [runs.cost] * stages if fits is None else [np.where(fit, runs.cost, np.inf) for fit in fits]
        )[-1]
    if slowest == np.inf:
        return None
    return _starts(_most_even(runs.before, stages, slowest * (1 + ROUNDING), fits), runs.count)


def bottlenecks(costs: Sequence[float], most: int) -> list[float]:
    """Least possible largest sum for 1, 2, ... ``most`` contiguous parts.

    >>> bottlenecks([1, 1, 1, 1, 4], 3)
    [8.0, 4.0, 4.0]
    """
    before = np.array([0.0, *accumulate(costs)])
    pieces = len(before) - 1
    best, result = before, [float(before[-1])]  # [j]: of the pieces before j
    for parts in range(2, min(most, pieces) + 1):
        first, ends = parts - 1, np.arange(parts, pieces + 1)
        # The later the last part begins, the faster it is, and the slower the others are: where these two meet is the
        # least, or beside it.
        meet = first + np.searchsorted(best[first:pieces] + before[first:pieces], before[ends])
        begins = np.clip(meet + np.array([[-1], [0], [1]]), first, ends - 1)
        least = np.maximum(best[begins], before[ends] - before[begins]).min(axis=0)
        best = np.concatenate([np.full(parts, np.inf), least])
        result.append(float(best[-1]))
    return (result + [np.inf] * (most - len(result)))[:most]


def leanest_line(runs: Runs, stages: int) -> float:
    """Least memory of a device with which some cut fits."""
    needs = _needs(runs, stages)
    return float("inf") if needs is None else _slowest(needs)[-1]


def _needs(runs: Runs, stages: int) -> list[Table] | None:
    """Per stage, what each run needs on its device; None where memory does not matter."""
    return [need for need in map(runs.bytes, range(stages)) if need is not None] or None


def _slowest(costs: Sequence[Table]) -> list[float]:
    """After each stage, the least possible largest cost of all pieces, given what runs cost as that stage."""
    best, result = _start(len(costs[0]) - 1), []
    for cost in costs:
        best = np.maximum(best[:, None], cost).min(axis=0)
        result.append(float(best[-1]))
    return result


def _starts(begins: Sequence[NDArray[np.int64]], end: int) -> list[int]:
    """The first piece of each stage, from where each begins if it ends before piece j."""
    starts = list[int]()
    for begin in reversed(begins):
        end = int(begin[end])
        starts.append(end)
    return starts[::-1]


def _most_even(
    before: Table, stages: int, bound: float, fits: list[NDArray[np.bool_]] | None
) -> list[NDArray[np.int64]]:
    """Per stage, where it begins if it ends before piece j; of cuts without a cost above ``bound`` the most even one.

    A stage that ends at j begins at one of the last few pieces before: only those sums are looked at, so that many
    stages take no longer than few.
    """
    n = len(before) - 1
    ends = np.arange(n + 1)
    widest = max(1, int((ends - np.searchsorted(before, before - bound * (1 + ROUNDING))).max()))
    # [k, j]: where a run of ``widest`` - k pieces that ends at j begins; runs of one length are a row, as the least of
    # few rows is quickly found.
    begin = ends[None, :] - np.arange(widest, 0, -1)[:, None]
    first = np.maximum(begin, 0)
    costs = np.where(begin >= 0, before[None, :] - before[first], np.inf)
    squares = np.where(costs <= bound, costs * costs, np.inf)
    best = np.full(widest + n + 1, np.inf)  # ``widest`` pieces before the first that there are not
    best[widest] = 0.0
    so_far = sliding_window_view(best[:-1], n + 1)  # [k, j]: of the pieces before that run, as ``best`` changes
    begins: list[NDArray[np.int64]] = []
    for stage in range(stages):
        added = squares if fits is None else np.where(fits[stage][first, ends[None, :]], squares, np.inf)
        sums = so_far + added
        # Sums of equal costs differ by rounding, which must not decide: the first of the least is the longest run.
        chosen = (sums <= sums.min(axis=0) * (1 + 1e-9)).argmax(axis=0)
        best[widest:] = sums[chosen, ends]
        begins.append(begin[chosen, ends])
    return begins


def _start(n: int) -> Table:
    """Nothing is cut yet: place 0 is reached at no cost."""
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    return best


Places = NDArray[np.int64]
UNKNOWN = 1e-9
"""Relative width of what halving leaves open. Each try that succeeds lowers the bound to a cost that a cut has."""


def cut_folded(runs: Runs, starts: Sequence[int]) -> list[int]:
    """The best cut with stages s and S-1-s on one device; ``starts`` is any one that fits the memory, or nothing
    that does if it is empty."""
    return _best(runs, starts, [None])


def cut_ring(runs: Runs, starts: Sequence[int], middle: int | None = None) -> list[int]:
    """The best cut with stages s and s + S/2 on one device; ``middle`` is where the second lap has to begin, and does
    in ``starts``."""
    half = len(starts) // 2
    return _best(runs, starts, range(half, runs.count - half + 1) if middle is None else [middle])


def fitting_folded(runs: Runs, stages: int) -> list[int] | None:
    """Some cut that fits the memory; None if there is none."""
    return _any(runs, stages, [None])


def fitting_ring(runs: Runs, stages: int) -> list[int] | None:
    """Some cut that fits the memory; None if there is none."""
    return _any(runs, stages, range(stages // 2, runs.count - stages // 2 + 1))


def _any(runs: Runs, stages: int, middles: Iterable[int | None]) -> list[int] | None:
    everything = float(runs.before[-1])
    tries = (_Try(runs, stages, everything, everything, middle).cut() for middle in middles)
    return next((result for result in tries if result is not None), None)


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
        result = _Try(runs, len(best), device, stage, middle).cut()
        if result is None:
            if first:
                return best
            low = limit
        else:
            best = result
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
    slowest = _slowest(runs)[-1]
    if slowest == np.inf:
        return None
    bound = slowest * (1 + ROUNDING)
    best, begins = _start(len(costs[0])), list[NDArray[np.int64]]()
    for run in runs:
        sums = best[:, None] + np.where(run <= bound, run, np.inf) ** 2
        least = sums.min(axis=0)
        # Rounding must not decide between equal sums: the first of the least is the longest run.
        begins.append((sums <= least * (1 + 1e-9)).argmax(axis=0))
        best = least
    return tuple(_starts(begins, len(costs[0])))
