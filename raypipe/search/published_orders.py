"""Published schedules as starting points, so that the search never returns an order worse than the best of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.passes import add_recompute, fuse_backward, split_backward, without_frozen
from raypipe.schedule.shape import Concat, Shape
from raypipe.search.problem import DeviceOrders, Problem

_SAME_AS_1F1B = ("dapple", "pipedream", "pipedream-2bw")
"""Schedules whose order equals that of 1F1B."""


def published(p: Problem, costs: CostTable) -> Iterator[DeviceOrders]:
    """Yield the orders of all named schedules that have this placement and fit its memory limit.

    Orders are generated lazily, because large ones take seconds.
    """
    if p.graph != StageGraph.chain(p.graph.stages):
        return
    split = JOINT.isdisjoint(p.kind)
    recompute = {s for s, kind in zip(p.stage, p.kind, strict=True) if kind == "R"}
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for name, family in SCHEDULES.items():
        if name in _SAME_AS_1F1B:
            continue
        for shape in _shapes_of(p, family.options):
            try:
                if family.stages(shape) != p.graph.stages:
                    continue
                made = generate(name, shape, costs)
            except ScheduleError:  # the family has no schedule of this shape
                continue
            if made.placement != p.placement or not _has_same_tasks(made, p):
                continue
            made = without_frozen(_split_forwards(made), p.rules.frozen)
            if recompute:
                made = add_recompute(made, p.rules.recompute, recompute)
            orders = p.orders(split_backward(made) if split else fuse_backward(made, everywhere=True))
            if orders is None or not p.fits(orders):
                continue
            key = tuple(map(tuple, orders))
            if key not in seen:
                seen.add(key)
                yield orders


def _shapes_of(p: Problem, options: frozenset[str]) -> Iterator[Shape]:
    """Shapes to generate a family with: every way of concatenation, with the memory limit and without one.

    A schedule generated without a limit may still fit.
    """
    replicas, least = len(p.placement), min(p.cap)
    limits = [least, None] if "memory_limit" in options and least < math.inf else [None]
    ways: tuple[Concat, ...] = get_args(Concat) if "concat" in options else ("direct",)
    for limit in limits:
        for concat in ways:
            yield Shape(
                devices=p.devices,
                microbatches=p.microbatches,
                chunks=p.graph.stages // p.devices if "chunks" in options else 1,
                pipelines=replicas if "pipelines" in options and replicas > 1 else 2,
                concat=concat,
                memory_limit=limit,
            )


def _split_forwards(schedule: Schedule) -> Schedule:
    """Replace each forward of several micro-batches by one forward per micro-batch."""
    return schedule.with_orders([t._replace(mbs=(mb,)) for t in order for mb in t.mbs] for order in schedule.orders)


def _has_same_tasks(made: Schedule, p: Problem) -> bool:
    """Exclude half micro-batches, which are other tasks, and rules that allow W before B where the problem does not."""
    return made.size == 1 and (made.rules.w_dep == "B" or p.rules.w_dep == "grad")
