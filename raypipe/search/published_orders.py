"""Published orders as starting points: the best fixed order of a placement is never beaten by forgetting it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.passes import add_recompute, fuse_backward, split_backward
from raypipe.schedule.shape import Concat, Shape
from raypipe.search.problem import Problem, Words

_SAME = ("dapple", "pipedream", "pipedream-2bw")
"""Orders that 1F1B has as well."""


def published(p: Problem, costs: CostTable) -> Iterator[Words]:
    """Orders of all named schedules that have this placement and keep its memory.

    Made one by one, as they are asked for: those of many tasks take seconds.
    """
    if p.graph != StageGraph.chain(p.graph.stages):
        return
    split = JOINT.isdisjoint(p.kind)
    recompute = {s for s, kind in zip(p.stage, p.kind, strict=True) if kind == "R"}
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for name, family in SCHEDULES.items():
        if name in _SAME:
            continue
        for shape in _shapes(p, family.options):
            try:
                if family.stages(shape) != p.graph.stages:
                    continue
                made = generate(name, shape, costs)
            except ScheduleError:  # the family does not exist for this shape
                continue
            if made.placement != p.placement or not _may_run(made, p):
                continue
            made = _singly(made)
            if recompute:
                made = add_recompute(made, p.rules.recompute, recompute)
            words = p.words(split_backward(made) if split else fuse_backward(made, everywhere=True))
            if words is None or not p.fits(words):
                continue
            key = tuple(map(tuple, words))
            if key not in seen:
                seen.add(key)
                yield words


def _shapes(p: Problem, options: frozenset[str]) -> Iterator[Shape]:
    """What a family may be asked for here: within the memory limit, and unlimited in case what it makes fits all the
    same; in each way of concatenation.
    """
    replicas, least = len(p.placement), min(p.cap)
    limits = [least, None] if "memory_limit" in options and least < math.inf else [None]
    ways: tuple[Concat, ...] = get_args(Concat) if "concat" in options else ("direct",)
    for limit in limits:
        for concat in ways:
            yield Shape(
                devices=p.devices, microbatches=p.microbatches,
                chunks=p.graph.stages // p.devices if "chunks" in options else 1,
                pipelines=replicas if "pipelines" in options and replicas > 1 else 2, concat=concat,
                memory_limit=limit,
            )  # fmt: skip


def _singly(schedule: Schedule) -> Schedule:
    """A forward of several micro-batches as one forward for each."""
    return schedule.with_orders([t._replace(mbs=(mb,)) for t in order for mb in t.mbs] for order in schedule.orders)


def _may_run(made: Schedule, p: Problem) -> bool:
    """Half micro-batches are other tasks, and a W before its own B needs a rule that lets it."""
    return made.size == 1 and (made.rules.w_dep == "B" or p.rules.w_dep == "grad")
