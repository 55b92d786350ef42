"""Chimera's configuration policy: take the largest micro-batch that fits, then the best depth and width."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.plan.best_first import TIE, Judge, Pick, Ranking, faster_cut, rank_key
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.form import options_of
from raypipe.plan.predict.prediction import Prediction
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.shape import Grid


@no_collection()
def largest_microbatch(judge: Judge, grids: Iterable[Grid], top: int, pick: Pick = lambda c: c) -> Ranking:
    """Return the ``top`` fastest plans, each with the largest micro-batch that fits its schedule, depth and width.

    "It greedily chooses to use the maximum micro-batch size fitting in the device memory", then (W, D) by the
    predicted time. As in the paper, micro-batches that leave fewer than D of them come only where there are no others,
    everything is recomputed (``judge.recompute`` says whether some of it may be kept) only where nothing fits without,
    two pipelines are combined ("the default setting of Chimera"), and the three ways to concatenate units are for
    N > D. Scheduling units of fewer than all micro-batches are left out: the rule has no word for them.

    Choosing the micro-batch of a schedule needs its memory, so schedules wait in a queue ordered by a lower bound over
    their micro-batch sizes, as in ``best_first``. Schedules beyond the ``top`` are never predicted.

    Source: Li and Hoefler 2021 (Chimera), sections 3.4 to 3.6 and 4.4.
    """
    result = Ranking()
    count = itertools.count()
    queue: list[tuple[float, int, list[Grid] | list[Candidate]]] = []

    def push(bound: float, node: list[Grid] | list[Candidate]) -> None:
        if bound < float("inf"):
            heapq.heappush(queue, (bound, next(count), node))

    for same in _by_shape(grids):
        push(min(map(judge.least_on, same)), same)
        result.searched += 1
    while queue:
        bound, _, node = heapq.heappop(queue)
        if len(result.best) >= top and bound > result.best[top - 1].step_s * (1 + TIE):
            break
        first = node[0]
        if isinstance(first, Candidate):
            chosen = _largest(judge, node, result)  # type: ignore[arg-type]
            if chosen is not None:
                result.best = sorted([*result.best, chosen], key=rank_key)
            continue
        for kind in _kinds(judge, node, pick):
            push(max(bound, min(map(judge.least, kind))), kind)
            result.searched += len(kind)
    result.best = sorted((faster_cut(judge, p) for p in result.best[:top]), key=rank_key)
    return result


def _by_shape(grids: Iterable[Grid]) -> list[list[Grid]]:
    """Group grids by depth and width, the largest micro-batch first; keep only those with N >= D if there are any."""
    shapes: dict[Grid, list[Grid]] = {}
    for grid in sorted(grids, key=lambda g: -g.microbatch):
        shapes.setdefault(replace(grid, microbatch=0, microbatches=0), []).append(grid)
    return [[g for g in same if g.microbatches >= g.stages] or same for same in shapes.values()]


def _kinds(judge: Judge, same: Sequence[Grid], pick: Pick) -> Iterable[list[Candidate]]:
    """Group the candidates on these grids by schedule, the largest micro-batch first."""
    kinds: dict[object, list[Candidate]] = {}
    for grid in same:
        for made in judge.on(grid):
            c = pick(made)
            if c is not None and _covered(c):
                kinds.setdefault((c.schedule, options_of(c)), []).append(c)
    return kinds.values()


def _covered(c: Candidate) -> bool:
    """Return whether the paper's rule covers the candidate."""
    units = c.concat == "direct" or c.microbatches > c.stages
    return c.unit in (None, c.microbatches) and c.pipelines == 2 and units


def _largest(judge: Judge, kind: Sequence[Candidate], found: Ranking) -> Prediction | None:
    """Predict the candidate with the largest micro-batch that fits; OOM fallbacks only where no plain one fits."""
    too_large: list[Prediction] = []
    for c in kind:
        with suppress(ScheduleError):  # the family has no such shape after all
            p = judge.predict(c)
            if p.fits:
                found.timed += 1
                return p
            too_large.append(p)
    found.too_large += too_large
    for p in too_large:
        fitting: list[Prediction] = []
        todo = judge.oom_fallback(p)
        for _, fallback in todo:
            with suppress(ScheduleError):
                other = judge.predict(fallback)
                if other.fits:
                    found.timed += 1
                    fitting.append(other)
                todo += judge.oom_fallback(other)
        if fitting:
            return min(fitting, key=rank_key)
    return None
