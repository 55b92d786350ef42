"""A bound on the makespan from one device at a time: every order of its own tasks, the others as fast as they like.

What the device asks of the others is only time: a micro-batch that leaves it comes back no sooner than the longest path
through the stages elsewhere allows. Its own tasks run one at a time, within its memory. That is where little memory
costs most: few micro-batches are under way at once, and what they wait for each other is in no longest path. All orders
are tried at once (``state_lists``), from the front for earliest starts and from the back for the least times left; both
tighten those of the other devices, until nothing moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raypipe.search.bounds.longest_paths import all_edges, earliest_starts, longest, remaining_times, tasks_of
from raypipe.search.bounds.state_lists import Floats, Ints, least_starts
from raypipe.search.problem import Problem

WIDTHS = (2, 8, 32)
"""States of a list: short lists take no time, long ones are tighter."""
PENDING = 64
"""Ends of tasks that one state holds at most."""
ROUNDS = 4
"""Times that every device is looked at with lists of one width."""
CLOSE = 1e-9


def one_device_bound(p: Problem, known: float, most: int) -> float:
    """Return a lower bound on the makespan of any order within the memory limit; ``known`` if none is shorter.

    Args:
        p: the problem.
        known: the makespan of some order.
        most: states to make, over all devices; one to four million take a second.
    """
    sweeps = _Sweeps(p, known, most)
    best = 0.0
    for width in WIDTHS:
        for _ in range(ROUNDS):
            found = [sweeps.look_at(d, width) for d in range(p.devices)]
            best = max(best, *(bound for bound, _ in found))
            if best >= known * (1 - CLOSE):
                return known
            if sweeps.left <= 0:
                return best
            if not any(moved for _, moved in found):
                break
    return best


@dataclass(slots=True)
class _Device:
    """One device's lanes, and how long a micro-batch is under way between them."""

    own: list[int]
    arcs: list[tuple[int, int, float]]
    """(lane, lane, lag): numbers in ``own``; the second starts no sooner than that after the end of the first."""
    looked_at: bool
    """Whether its states are few enough."""


class _Sweeps:
    """Bounds on every task, which every look at a device may tighten."""

    def __init__(self, p: Problem, known: float, most: int) -> None:
        self.p, self.known, self.left = p, known, most
        self.before = all_edges(p)
        self.heads = earliest_starts(p, self.before)
        self.tails = remaining_times(p, self.before)
        self.devices = [_device(p, own) for own in p.lanes_of]

    def look_at(self, d: int, width: int) -> tuple[float, bool]:
        """A bound by one device, and whether that tells more of any task than was known."""
        bound, moved = 0.0, False
        for back in (False, True):
            if not self.devices[d].looked_at or self.left <= 0:
                break
            found, starts = self.swept(d, width, back)
            bound = max(bound, found)
            if bound >= self.known * (1 - CLOSE):
                return self.known, False
            times = self.tails if back else self.heads
            for t, at in starts.items():
                if at > times[t] + CLOSE * self.known:
                    times[t], moved = at, True
        if moved:
            self.heads = earliest_starts(self.p, self.before, known=self.heads)
            self.tails = remaining_times(self.p, self.before, known=self.tails)
        return bound, moved

    def swept(self, d: int, width: int, back: bool) -> tuple[float, dict[int, float]]:
        """The bound, and the earliest start of each of the device's tasks; none if there are too many states.

        ``back``: of the step that runs backwards, whose starts are the times left after each task.
        """
        p, one = self.p, self.devices[d]
        own, way = one.own, -1 if back else 1
        count = np.array([p.count[c] for c in own], np.int64)
        tasks = [list(tasks_of(p, c))[::way] for c in own]
        head, tail = (self._table(tasks, of) for of in (self.heads, self.tails)[::way])
        starts = np.zeros_like(head)
        takes, frees = (self._of(own, values) for values in (p.takes, p.frees))
        delta = takes - frees
        arcs = sorted(((b, a, lag) if back else (a, b, lag) for a, b, lag in one.arcs), key=lambda arc: arc[1])
        users = sorted((a, b) for a, b, _ in arcs)
        bound, made = least_starts(
            count,
            self._of(own, p.time),
            head,
            tail,
            _firsts([b for _, b, _ in arcs], len(own)),
            np.array([a for a, _, _ in arcs], np.int64),
            np.array([lag for _, _, lag in arcs], np.float64),
            _firsts([a for a, _ in users], len(own)),
            np.array([b for _, b in users], np.int64),
            float(count @ delta) if back else 0.0,
            -delta if back else delta,
            frees if back else takes,
            p.cap[d] * (1 + CLOSE) + CLOSE,
            float(self.known),
            width,
            self.left,
            PENDING,
            starts,
        )
        self.left -= made
        if bound < 0:
            one.looked_at = False
            return 0.0, {}
        earliest = zip(tasks, starts.tolist(), strict=True)
        return bound, {t: at for row, times in earliest for t, at in zip(row, times, strict=False)}

    def _table(self, tasks: list[list[int]], times: list[float]) -> Floats:
        """(lanes, tasks of the longest): a time of each task."""
        table = np.zeros((len(tasks), max(map(len, tasks))))
        for a, row in enumerate(tasks):
            table[a, : len(row)] = [times[t] for t in row]
        return table

    def _of(self, own: list[int], values: list[float]) -> Floats:
        return np.array([values[c] for c in own], np.float64)


def _device(p: Problem, lanes: list[int]) -> _Device:
    """The arcs between the device's own lanes; those that others imply are left out."""
    own = [c for c in lanes if p.count[c]]
    far: dict[tuple[int, int], float] = {}
    for a, c in enumerate(own):
        for b, e in enumerate(own):
            if a != b and p.replica[c] == p.replica[e] and (path := longest(p, c, e)) > -math.inf:
                far[a, b] = path - p.time[c] - p.time[e]
    tiny = CLOSE * max(far.values(), default=0.0)

    def implied(a: int, b: int, lag: float) -> bool:
        between = (x for x in range(len(own)) if (a, x) in far and (x, b) in far)
        return any(far[a, x] + p.time[own[x]] + far[x, b] >= lag - tiny for x in between)

    arcs = [(a, b, lag) for (a, b), lag in far.items() if not implied(a, b, lag)]
    return _Device(own, arcs, bool(own) and math.prod(p.count[c] + 1 for c in own) < 2**62)


def _firsts(numbers: list[int], lanes: int) -> Ints:
    """Where each lane's entries begin in a list that is sorted by lane."""
    return np.searchsorted(np.array(numbers, np.int64), np.arange(lanes + 1)).astype(np.int64)
