"""Chimera's rule of thumb as a search: always the largest micro-batch that fits, then the best depth and width."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate, Grid, candidates
from raypipe.plan.predict import Predictor
from raypipe.plan.prediction import Prediction
from raypipe.plan.search import Pick, Ranking, rank_key


def largest_microbatch(judge: Predictor, grids: Iterable[Grid], top: int, pick: Pick = lambda c: c) -> Ranking:
    """The ``top`` fastest plans that use the largest micro-batch that fits their schedule, depth and width.

    "It greedily chooses to use the maximum micro-batch size fitting in the device memory", then (W, D) by the
    predicted time. Scheduling units of fewer than all micro-batches are left out: the rule has no word for them.

    Source: Li and Hoefler 2021 (Chimera), section 3.4.
    """
    found = Ranking()
    chosen: list[Prediction] = []
    order = sorted(grids, key=lambda g: (g.stages, g.replicas, -g.microbatch))
    for _, group in groupby(order, key=lambda g: (g.stages, g.replicas)):
        done: set[object] = set()
        for grid in group:
            for made in candidates(grid, judge.most_stages):
                c = pick(made)
                if c is None or c.unit not in (None, c.microbatches):
                    continue
                kind = _kind(c)
                found.searched += 1
                if kind in done or judge.least(c) == float("inf"):
                    continue
                try:
                    prediction = judge.predict(c)
                except ScheduleError:
                    continue
                if prediction.fits:
                    done.add(kind)
                    found.timed += 1
                    chosen.append(prediction)
                else:
                    found.too_large.append(prediction)
    found.best = sorted(chosen, key=rank_key)[:top]
    return found


def _kind(c: Candidate) -> object:
    return c.schedule, c.chunks, c.pipelines, c.concat
