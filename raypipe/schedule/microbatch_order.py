"""Which of a step's unequal micro-batches goes first: searched for each step, while the programs stay as they are.

A program runs micro-batch ids; which rows of the data an id stands for may change from step to step. With unequal
micro-batches it matters: a long one that comes first or last keeps every other stage waiting while the pipeline fills
or drains, and in the middle others are in flight beside it. Fixed orders are tried first, then swaps of two.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.walk import walk

BUDGET_S = 0.05
"""Seconds of search for a step, on the driver's CPU."""
Order = tuple[int, ...]
"""Per micro-batch of the data, which of them takes its place."""


class Copies(NamedTuple):
    """Which micro-batches copies take: those of ``together`` consecutive ones are of the same samples."""

    each: int
    """Micro-batch ids of one copy."""
    together: int

    def of_data(self, mb: int) -> int:
        """Return the micro-batch of the data that a micro-batch id stands for.

        >>> [Copies(each=2, together=2).of_data(mb) for mb in range(8)]
        [0, 1, 0, 1, 2, 3, 2, 3]
        """
        copy, number = divmod(mb, self.each)
        return copy // self.together * self.each + number


OWN_SAMPLES = Copies(1, 1)


def longest_first(times: Sequence[float]) -> list[int]:
    """Return micro-batches from the longest on."""
    return sorted(range(len(times)), key=lambda i: -times[i])


def shortest_first(times: Sequence[float]) -> list[int]:
    """Return micro-batches from the shortest on."""
    return longest_first(times)[::-1]


def ends_light(times: Sequence[float]) -> list[int]:
    """Return short micro-batches at both ends, and the longest in the middle.

    >>> ends_light([5.0, 1.0, 4.0, 2.0, 3.0])
    [1, 4, 0, 2, 3]
    """
    by_time = shortest_first(times)
    return by_time[::2] + by_time[1::2][::-1]


RULES: tuple[Callable[[Sequence[float]], list[int]], ...] = (ends_light, longest_first, shortest_first)
"""The fixed orders that are tried, within each copy."""


class OrderSearch:
    """Finds orders of micro-batches for steps of one schedule.

    Args:
        schedule: the whole step, without slices.
        costs: time of each task for a micro-batch of mean length.
        copies: data-parallel copies; micro-batches stay in theirs.
        together: consecutive copies that have the same samples.
    """

    def __init__(self, schedule: Schedule, costs: CostTable, copies: int, together: int = 1) -> None:
        self._graph, self._comm = link(schedule), costs.comm
        tasks = self._graph.tasks
        self._base = costs.durations(schedule, tasks)
        scaled = [(number, task.mbs) for number, task in enumerate(tasks) if task.mbs and task.kind not in NETWORK]
        each = (1 + max(mb for _, mbs in scaled for mb in mbs)) // copies
        of_data = Copies(each, together).of_data
        self._scaled = [(number, [of_data(mb) for mb in mbs]) for number, mbs in scaled]
        self.microbatches = each * (copies // together)
        self._copies = [range(begin, begin + each) for begin in range(0, self.microbatches, each)]

    def seconds(self, times: Sequence[float], order: Sequence[int] | None = None) -> float:
        """Return the time of a step.

        Args:
            times: of each micro-batch of the data, in any unit; their mean takes what the cost table says.
            order: see ``Order``; None as the data has them.
        """
        mean = sum(times) / len(times)
        share = [times[i] / mean for i in (range(len(times)) if order is None else order)]
        durations = list(self._base)
        for number, mbs in self._scaled:
            durations[number] *= sum(share[mb] for mb in mbs) / len(mbs)
        return max(walk(self._graph, durations, self._comm).end)

    def best(self, times: Sequence[float], seed: int = 0, budget_s: float | None = BUDGET_S) -> Order | None:
        """Return the order with the shortest step that was found in time; None if that is the data's own.

        Args:
            times: see ``seconds``.
            seed: of the swaps.
            budget_s: seconds, but for the order that is being timed when they are over. None: the fixed orders alone,
                which gives the same order each time.
        """
        swaps = budget_s is not None
        ends = math.inf if budget_s is None else time.perf_counter() + budget_s
        own = list(range(self.microbatches))
        if max(times) <= min(times) or (budget_s is not None and budget_s <= 0):
            return None
        best, least = own, self.seconds(times)
        for rule in RULES:
            if time.perf_counter() > ends:
                break
            tried = list(chain.from_iterable(self._within(copy, rule, times) for copy in self._copies))
            if (took := self.seconds(times, tried)) < least:
                best, least = tried, took
        draw = random.Random(seed)
        movable = [copy for copy in self._copies if len(copy) > 1]
        while swaps and movable and time.perf_counter() < ends:
            a, b = draw.sample(draw.choice(movable), 2)
            if times[best[a]] == times[best[b]]:
                continue
            tried = list(best)
            tried[a], tried[b] = best[b], best[a]
            if (took := self.seconds(times, tried)) < least:
                best, least = tried, took
        return None if best == own else tuple(best)

    @staticmethod
    def _within(copy: range, rule: Callable[[Sequence[float]], list[int]], times: Sequence[float]) -> list[int]:
        return [copy[i] for i in rule(times[copy.start : copy.stop])]
