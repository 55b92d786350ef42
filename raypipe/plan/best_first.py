"""Best-first search for the fastest plans that fit. It is exact, because its lower bounds are valid.

Three kinds of node share one queue ordered by their lower bounds: grids (W, D, B), candidates on a grid, and OOM
fallbacks of a candidate. A node is expanded only while its bound is below the K-th best step found, so most candidates
are never simulated.
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
"""Step times that differ relatively by less than this count as equal: the difference is rounding."""


NEAR = 5e-3
"""The simplest plan within this share of the fastest is chosen. Predictions are no more precise: two profiles of one
machine shift plans against each other by about as much, so the fastest would change from start to start."""


class Judge(Protocol):
    """The cost model as the search uses it. All times are seconds of a step."""

    def on(self, grid: Grid) -> Iterable[Candidate]:
        """Return the candidates of a grid, without OOM fallbacks."""

    def least_on(self, grid: Grid) -> float:
        """Return a lower bound on the step of every candidate of the grid; infinite if none fits."""

    def least(self, candidate: Candidate) -> float:
        """Return a lower bound on the candidate's step; infinite if its weights alone do not fit."""

    def recut(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with balanced devices; None if its devices are balanced already."""

    def outright(self, candidate: Candidate) -> list[tuple[float, Candidate]] | None:
        """If static bounds already prove out-of-memory, return the OOM fallbacks with lower bounds; else None."""

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict a candidate's step time and memory.

        Raises:
            ScheduleError: the schedule does not exist for this shape.
        """

    def oom_fallback(self, prediction: Prediction) -> list[tuple[float, Candidate]]:
        """Return slower variants that need less memory, with lower bounds, for a candidate that does not fit."""


Pick = Callable[[Candidate], Candidate | None]
"""Returns the candidate, or one to consider in its place; None if it must not be chosen."""


@dataclass(slots=True)
class Ranking:
    """The result of a search."""

    best: list[Prediction] = field(default_factory=list)
    """The fastest plans that fit, the fastest first."""
    near: list[Prediction] = field(default_factory=list)
    """Further plans nearly as fast as the fastest: every one that is simpler than all faster plans, and maybe more."""
    too_large: list[Prediction] = field(default_factory=list)
    """Predicted plans that do not fit."""
    unmade: list[Candidate] = field(default_factory=list)
    """Candidates that static bounds proved not to fit, so that no order was generated."""
    searched: int = 0
    """Grids and candidates that were timed or ruled out."""
    timed: int = 0
    """Candidates whose step was simulated."""


def rank_key(p: Prediction) -> tuple[object, ...]:
    """Sort key: faster plans first; of equal step times the simpler one, then the one with less memory."""
    return float(f"{p.step_s:.5e}"), p.candidate.simplicity, max(p.memory_bytes)


@no_collection()
def best_first(judge: Judge, grids: Iterable[Grid], top: int, pick: Pick = lambda c: c, near: float = 0.0) -> Ranking:
    """Find the ``top`` fastest plans that fit.

    The search ranks plans whose cut balances the stages, with the same result as from timing all of them. Where a
    device holds several stages, balanced devices may be faster: the plans found, and those that an estimate brings near
    the first, then take the cut with the shorter step.

    Args:
        judge: predictions and lower bounds.
        grids: the grids to search.
        top: number of plans to find.
        pick: filters or replaces candidates.
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
                push(max(bound, least) if other.shard == node.shard else least, other)
            continue
        try:
            prediction = judge.predict(node)
        except ScheduleError:  # the family has no schedule of this shape
            continue
        if prediction.fits:
            found.timed += 1
            twin = fitting.get(_same(prediction))
            if twin is None or rank_key(prediction) < rank_key(twin):
                fitting[_same(prediction)] = prediction
            continue
        found.too_large.append(prediction)
        for least, other in judge.oom_fallback(prediction):  # shards take other sums and updates than no shards
            push(max(bound, least) if other.shard == node.shard else least, other)
    ranked = sorted(fitting.values(), key=rank_key)
    if ranked:
        kept = [p for i, p in enumerate(ranked) if i < top or _shrunk(judge, p) <= ranked[0].step_s * (1 + near)]
        ranked = sorted((faster_cut(judge, p) for p in kept), key=rank_key)
    found.best = ranked[:top]
    found.near = [p for p in ranked[top:] if p.step_s <= ranked[0].step_s * (1 + near)]
    return found


def _shrunk(judge: Judge, p: Prediction) -> float:
    """An estimate of the plan's step with the faster cut: the step is taken to shrink as its lower bound does."""
    recut = judge.recut(p.candidate)
    return p.step_s if recut is None else p.step_s * min(1.0, judge.least(recut) / judge.least(p.candidate))


def faster_cut(judge: Judge, p: Prediction) -> Prediction:
    """Return the plan with balanced stages or with balanced devices, whichever fits and has the shorter step."""
    recut = judge.recut(p.candidate)
    if recut is None or judge.least(recut) >= p.step_s:
        return p
    other = judge.predict(recut)
    return min(p, other, key=rank_key) if other.fits else p


def _plainness(node: Grid) -> tuple[int, ...]:
    return plainness(node, node.form) if isinstance(node, Candidate) else least_plainness(node)


def simplest(ranked: Iterable[Prediction], near: float = NEAR) -> Prediction:
    """Return the simplest plan within ``near`` of the fastest; of equally simple ones the fastest."""
    ranked = list(ranked)
    fastest = min(p.step_s for p in ranked)
    return min((p for p in ranked if p.step_s <= fastest * (1 + near)), key=lambda p: (p.plainness, rank_key(p)))


def _kth(found: Iterable[Prediction], top: int) -> float:
    return heapq.nsmallest(top, (p.step_s for p in found))[-1]


def _same(p: Prediction) -> object:
    """A key that is equal for plans that do the same under two names (full-recompute 1F1B and early-recompute)."""
    c = p.candidate
    return c.stages, c.replicas, c.tensor, c.microbatch, float(f"{p.step_s:.5e}"), p.memory_bytes
