"""Published orders as starting points: the best fixed order of a placement is never beaten by forgetting it."""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.auto.problem import Problem, Words
from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import StageGraph
from raypipe.schedule.passes import fuse_backward, split_backward
from raypipe.schedule.shape import Shape

_NAMES = ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "bfs", "chimera-tight", "chimera", "gems")


def published(p: Problem, costs: CostTable) -> Iterator[Words]:
    """Orders of named schedules that have this placement and keep its memory."""
    if p.graph != StageGraph.chain(p.graph.stages) or p.rules.skip_first_b or "R" in p.kind:
        return
    replicas, split = len(p.placement), "BW" not in p.kind
    for name in _NAMES:
        options = SCHEDULES[name].options
        try:
            shape = Shape(
                devices=p.devices, microbatches=p.microbatches,
                chunks=p.graph.stages // p.devices if "chunks" in options else 1,
                pipelines=replicas if "pipelines" in options and replicas > 1 else 2,
            )  # fmt: skip
            made = generate(name, shape, costs)
        except ScheduleError:  # the family does not exist for this shape
            continue
        if made.placement != p.placement:
            continue
        words = p.words(split_backward(made) if split else fuse_backward(made, everywhere=True))
        if words is not None and p.fits(words):
            yield words
