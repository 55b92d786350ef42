"""The objectives of the search: their values, their lower bounds, and how tabu search measures them."""

from __future__ import annotations

from typing import Literal

from raypipe.schedule.costs import CostTable
from raypipe.search.bounds import order_bounds as bounds
from raypipe.search.problem import DeviceOrders, Problem
from raypipe.search.timed_order import Frame, Timed
from raypipe.simulate.period import steady

Objective = Literal["makespan", "span", "period"]
"""What the search minimises. ``makespan``: the time from 0 to the last end. ``span``: the longest time from a device's
first start to its last end. ``period``: the time per step in steady state."""


class Measure:
    """An objective over the orders of one problem."""

    def __init__(self, p: Problem, costs: CostTable, objective: Objective) -> None:
        self.p, self.costs, self.objective = p, costs, objective

    def bound(self) -> float:
        """A lower bound on the objective: no order has a smaller value."""
        if self.objective == "makespan":
            return bounds.lower_bound(self.p)
        return bounds.span_bound(self.p) if self.objective == "span" else bounds.period_bound(self.p)

    def value(self, orders: DeviceOrders) -> float:
        """The objective of an order that can run."""
        if self.objective == "period":
            return steady(self.p.schedule(orders), self.costs).rate
        state = Timed(self.p)
        state.load(orders)
        return state.makespan if self.objective == "makespan" else state.span

    def frame(self, orders: DeviceOrders) -> Frame | None:
        """The frame in which local search measures this order: there, a shorter order has a smaller objective.

        With replicas that holds only mostly, since replicas also wait for each other's gradients; the caller then
        measures the result again. For ``span``, the frame counts from each device's first start. For ``period``, each
        device begins where it begins in steady state: the step repeats every T if all devices then end within T.
        """
        if self.objective == "makespan":
            return None
        if self.objective == "span":
            state = Timed(self.p)
            state.load(orders)
            begun = [state.end[w[0]] - state.time[w[0]] if w else 0.0 for w in orders]
            return Frame([0.0] * self.p.devices, [-at for at in begun])
        begun = list(steady(self.p.schedule(orders), self.costs).starts)
        return Frame(begun, [-at for at in begun])
