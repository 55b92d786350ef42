"""Close the gaps that tasks leave which frozen stages need not run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.families.greedy import Policy, order_greedily
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BW, Kind
from raypipe.schedule.live_activations import live_counts
from raypipe.schedule.walk import walk

ORDERS: tuple[tuple[Kind, ...], ...] = ((BW, "B", "F", "W"), ("F", BW, "B", "W"))
"""Kinds by priority: gradients are sent on first, or forwards run ahead as far as memory allows."""
WAYS = ((1.0, 0.0), (1.0, 0.1), (0.2, 0.1))
"""Times of a W (short for adapters) and of a message, in those of an F or a B, for which no order is to be longer."""
MOST = 2048
"""Stages times micro-batches of a step beyond which it stays as it is: a planner asks for many of them."""


class Length(NamedTuple):
    """How long a step takes, and how long its busiest device: steps that follow one another may take no more."""

    makespan: float
    span: float


def closed_up(schedule: Schedule) -> Schedule:
    """Return a shorter order of the same tasks in the same memory, or the schedule itself.

    A free device starts what it may of the next tasks in the present order, by kind, while it holds no more activations
    than it does at most in that order. What is found is taken if it is no longer for any of a few costs, and shorter
    for one of them.

    Args:
        schedule: of one copy: forwards and backwards of single micro-batches. Others are returned as they are.
    """
    tasks = [task for order in schedule.orders for task in order]
    plain = all(task.kind in ORDERS[0] and len(task.mbs) == 1 for task in tasks)
    if not plain or schedule.versions != "flush" or schedule.stages * schedule.microbatches * schedule.size > MOST:
        return schedule
    limits = [max(row, default=0) for row in live_counts(schedule)]
    place = {task: n for order in schedule.orders for n, task in enumerate(order)}
    tables = [CostTable.even(schedule.stages, weight_grad=w, comm=comm) for w, comm in WAYS]
    best, known = schedule, _lengths(schedule, tables)
    for kinds in ORDERS:
        found = order_greedily(schedule, tables[1], Policy(kinds=kinds, key=lambda t: (place[t],), limit=limits))
        if found is None or found.schedule.orders == best.orders:
            continue
        lengths = _lengths(found.schedule, tables)
        no_longer = all(new <= old + 1e-9 for new, old in zip(_all(lengths), _all(known), strict=True))
        if no_longer and sum(_all(lengths)) < sum(_all(known)) - 1e-9:
            best, known = found.schedule, lengths
    return best


def _all(lengths: Iterable[Length]) -> list[float]:
    return [value for length in lengths for value in length]


def _lengths(schedule: Schedule, tables: Iterable[CostTable]) -> list[Length]:
    graph = link(schedule)
    return [_length(graph, table) for table in tables]


def _length(graph: TaskGraph, costs: CostTable) -> Length:
    done = walk(graph, costs.durations(graph.schedule, graph.tasks), costs.comm)
    lanes = pairwise(graph.first[: graph.schedule.devices + 1])
    spans = (max(done.end[a:b]) - done.start[a] for a, b in lanes if b > a)
    return Length(max(done.end), max(spans))
