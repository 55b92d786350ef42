"""What is made small, and how an order is held against it."""

from __future__ import annotations

from typing import Literal

from raypipe.schedule.costs import CostTable
from raypipe.search.bounds import order_bounds as bounds
from raypipe.search.problem import Problem, Words
from raypipe.search.timed_order import Frame, Timed
from raypipe.simulate.period import steady

Objective = Literal["makespan", "span", "period"]
"""What is made small: time 0 to the last end; the longest device's first start to last end; steady time per step."""


class Measure:
    """An objective over the orders of one problem."""

    def __init__(self, p: Problem, costs: CostTable, objective: Objective) -> None:
        self.p, self.costs, self.objective = p, costs, objective

    def bound(self) -> float:
        """No order has a smaller value."""
        if self.objective == "makespan":
            return bounds.lower_bound(self.p)
        return bounds.span_bound(self.p) if self.objective == "span" else bounds.period_bound(self.p)

    def value(self, words: Words) -> float:
        """Of an order that can run."""
        if self.objective == "period":
            return steady(self.p.schedule(words), self.costs).rate
        state = Timed(self.p)
        state.load(words)
        return state.makespan if self.objective == "makespan" else state.span

    def frame(self, words: Words) -> Frame | None:
        """In which the local search may shorten this order: where its value is the order's own, and a smaller one means
        a smaller objective (with replicas, mostly: they also wait for each other's gradients, and are measured again).

        The span counts from each device's first start, which is as early in any good order. A step repeats every T if
        its devices, each begun where it begins in steady state, all end within T.
        """
        if self.objective == "makespan":
            return None
        if self.objective == "span":
            state = Timed(self.p)
            state.load(words)
            begun = [state.end[w[0]] - state.time[w[0]] if w else 0.0 for w in words]
            return Frame([0.0] * self.p.devices, [-at for at in begun])
        begun = list(steady(self.p.schedule(words), self.costs).starts)
        return Frame(begun, [-at for at in begun])
