"""Best-first search over candidates with valid lower bounds: the fastest plans that fit, none better missed.

Three kinds of node share one queue, ordered by the least time that anything behind them can take: grids (W, D, B),
candidates on a grid, and what relieves a candidate's memory. A node is opened only while its bound is below the K-th
best step found, so that most candidates are never timed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate, least_plainness, plainness
from raypipe.plan.predict.prediction import Prediction
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.shape import Grid

TIE = 1e-6
"""Steps that differ by less are equally long: rounding, and nothing a run could show."""


NEAR = 5e-3
"""Among plans within this share of the fastest the simplest is chosen. Predictions are no better than that: profiles of
one machine, measured one after the other, move plans against each other by as much, so that the fastest would be
another one at every start."""


class Judge(Protocol):
    """What the search asks of the cost model."""

    def on(self, grid: Grid) -> Iterable[Candidate]:
        """The candidates of a grid, before anything is done about memory."""

    def least_on(self, grid: Grid) -> float:
        """No candidate of the grid takes less; infinite where none fits."""

    def least(self, candidate: Candidate) -> float:
        """The candidate takes no less; infinite where its weights alone do not fit."""

    def outright(self, candidate: Candidate) -> list[tuple[float, Candidate]] | None:
        """Where it takes no order to know that it does not fit: what may relieve it, with bounds; else None."""

    def predict(self, candidate: Candidate) -> Prediction:
        """Its time and memory."""

    def oom_fallback(self, prediction: Prediction) -> list[tuple[float, Candidate]]:
        """With their bounds, candidates that take longer and hold less, for one that does not fit."""


Pick = Callable[[Candidate], Candidate | None]
"""The candidate, or what is to be considered in its place; None for one that may not be chosen."""


@dataclass(slots=True)
class Ranking:
    """What a search found."""

    best: list[Prediction] = field(default_factory=list)
    """Those that fit, the fastest first."""
    near: list[Prediction] = field(default_factory=list)
    """Others nearly as fast as the fastest; among all, none of them is both faster and simpler than another."""
    too_large: list[Prediction] = field(default_factory=list)
    """Those met on the way that do not fit."""
    unmade: list[Candidate] = field(default_factory=list)
    """Those of which it took no order to know that they do not fit."""
    searched: int = 0
    """Candidates, and whole grids, that were timed or ruled out."""
    timed: int = 0
    """Candidates whose step was simulated."""


def rank_key(p: Prediction) -> tuple[object, ...]:
    """Faster first; of equally long steps the simpler plan, then the one that takes less memory."""
    return float(f"{p.step_s:.5e}"), p.candidate.simplicity, max(p.memory_bytes)


@no_collection()
def best_first(
    judge: Judge, grids: Iterable[Grid], top: int, pick: Pick = lambda c: c, near: float = 0.0
) -> Ranking:  # fmt: skip
    """The ``top`` fastest plans that fit, exactly: the same as timing every candidate.

    Args:
        judge: times and bounds.
        grids: where to look.
        top: how many plans.
        pick: which candidates may be chosen.
        near: also find, within this share of the fastest, every plan that is simpler than all faster ones.
    """
    found = Ranking()
    count = itertools.count()
    queue: list[tuple[float, int, Grid]] = []

    def push(bound: float, node: Grid) -> None:
        found.searched += 1
        if bound < float("inf"):
            heapq.heappush(queue, (bound, next(count), node))

    for grid in grids:
        push(judge.least_on(grid), grid)
    fitting: dict[object, Prediction] = {}
    while queue:
        bound, _, node = heapq.heappop(queue)
        if len(fitting) >= top and bound > _kth(fitting.values(), top) * (1 + TIE):
            if bound > _kth(fitting.values(), 1) * (1 + max(near, TIE)):
                break
            if any(p.step_s <= bound and p.plainness <= _plainness(node) for p in fitting.values()):
                continue
        if not isinstance(node, Candidate):
            for made in judge.on(node):
                candidate = pick(made)
                if candidate is not None:
                    push(max(bound, judge.least(candidate)), candidate)
            continue
        oom_fallbacks = judge.outright(node)
        if oom_fallbacks is not None:
            found.unmade.append(node)
            for least, other in oom_fallbacks:
                push(max(bound, least), other)
            continue
        try:
            prediction = judge.predict(node)
        except ScheduleError:  # the family has no such shape after all
            continue
        if prediction.fits:
            found.timed += 1
            twin = fitting.get(_same(prediction))
            if twin is None or rank_key(prediction) < rank_key(twin):
                fitting[_same(prediction)] = prediction
            continue
        found.too_large.append(prediction)
        for least, other in judge.oom_fallback(prediction):
            push(max(bound, least), other)
    ranked = sorted(fitting.values(), key=rank_key)
    found.best = ranked[:top]
    found.near = [p for p in ranked[top:] if p.step_s <= ranked[0].step_s * (1 + near)]
    return found


def _plainness(node: Grid) -> tuple[int, ...]:
    return plainness(node, node.form) if isinstance(node, Candidate) else least_plainness(node)


def simplest(ranked: Iterable[Prediction], near: float = NEAR) -> Prediction:
    """Of those within ``near`` of the fastest, the simplest; of equally simple ones the fastest."""
    ranked = list(ranked)
    fastest = min(p.step_s for p in ranked)
    return min((p for p in ranked if p.step_s <= fastest * (1 + near)), key=lambda p: (p.plainness, rank_key(p)))


def _kth(found: Iterable[Prediction], top: int) -> float:
    return heapq.nsmallest(top, (p.step_s for p in found))[-1]


def _same(p: Prediction) -> object:
    """Equal for plans that do the same under two names (1F1B that recomputes everything, early recompute)."""
    c = p.candidate
    return c.stages, c.replicas, c.tensor, c.microbatch, float(f"{p.step_s:.5e}"), p.memory_bytes
