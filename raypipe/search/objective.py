"""The objectives of the search: their values, their lower bounds, and how walks measure them."""

from __future__ import annotations

from typing import Literal

from raypipe.schedule.costs import CostTable
from raypipe.search import order_bounds as bounds
from raypipe.search.list_scheduling import LaneArrays
from raypipe.search.order_walk import Frame, times
from raypipe.search.problem import DeviceOrders
from raypipe.simulate.period import steady

Objective = Literal["makespan", "span", "period"]
"""What the search minimises. ``makespan``: the time from 0 to the last end. ``span``: the longest time from a device's
first start to its last end. ``period``: the time per step in steady state."""


_MOST_TIGHTENED = 20_000
"""Tasks times devices up to which the bound is tightened; beyond it, longest paths alone take seconds."""


class Measure:
    """An objective over the orders of one problem."""

    def __init__(self, layout: LaneArrays, costs: CostTable, objective: Objective) -> None:
        self.layout, self.p, self.costs, self.objective = layout, layout.problem, costs, objective

    def bound(self) -> float:
        """A lower bound on the objective: no order has a smaller value."""
        if self.objective == "makespan":
            return bounds.lower_bound(self.p)
        return bounds.span_bound(self.p) if self.objective == "span" else bounds.period_bound(self.p)

    def tighter_bound(self, known: float, states: int) -> float:
        """The same by more work, where there is such a bound: ``one_device_bound`` with so many states.

        ``known`` is the objective of some order; an order has to be shorter to be of interest.
        """
        if self.objective != "makespan" or self.p.tasks * self.p.devices > _MOST_TIGHTENED:
            return 0.0
        from raypipe.search.one_device import one_device_bound  # machine code, which few runs need

        return one_device_bound(self.p, known, states)

    def value(self, orders: DeviceOrders) -> float:
        """The objective of an order that can run."""
        if self.objective == "period":
            return steady(self.p.schedule(orders), self.costs).rate
        begin, end, _ = times(self.layout, orders)
        if self.objective == "makespan":
            return max(end)
        return max(end[order[-1]] - begin[order[0]] for order in orders if order)

    def frame(self, orders: DeviceOrders) -> Frame | None:
        """The frame in which local search measures this order: there, a shorter order has a smaller objective.

        With replicas that holds only mostly, since replicas also wait for each other's gradients; the caller then
        measures the result again. For ``span``, the frame counts from each device's first start. For ``period``, each
        device begins where it begins in steady state: the step repeats every T if all devices then end within T.
        """
        if self.objective == "makespan":
            return None
        if self.objective == "span":
            begin = times(self.layout, orders).begin
            begun = [begin[order[0]] if order else 0.0 for order in orders]
            return Frame([0.0] * self.p.devices, [-at for at in begun])
        begun = list(steady(self.p.schedule(orders), self.costs).starts)
        return Frame(begun, [-at for at in begun])
