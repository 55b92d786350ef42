"""A cross of two orders: the tasks of each device by a weighted mean of their start times.

A mean of two possible sets of starts keeps every dependency, so the tasks can run in that order; only the memory limit
needs a check. In spirit path relinking (Peng, Lue and Cheng 2015, tabu search with path relinking for the job shop).
"""

from __future__ import annotations

from raypipe.search.problem import Problem, Words
from raypipe.search.timed_order import Timed


def cross(p: Problem, one: Words, other: Words, weight: float) -> Words | None:
    """The order between two others, ``weight`` of the way from ``other`` to ``one``; None if it needs more memory."""
    mean = [0.0] * p.tasks
    place = [0.0] * p.tasks
    for words, share in ((one, weight), (other, 1.0 - weight)):
        state = Timed(p)
        state.load(words)
        for t in range(p.tasks):
            mean[t] += share * (state.end[t] - state.time[t])
        # Tasks that take no time may start together; their places tell which comes first in both orders.
        for k, t in enumerate(state.topological):
            place[t] += share * k
    found = [sorted(word, key=lambda t: (mean[t], place[t])) for word in one]
    return found if p.fits(found) else None
