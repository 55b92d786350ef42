"""Best-first search for the fastest plans that fit. It is exact where it has the time: its lower bounds are valid.

Nodes wait in the order of their lower bounds: grids (W, D, B) in one queue, candidates on a grid and OOM fallbacks of a
candidate in another. A node is expanded only while its bound is below the K-th best step found, so most candidates are
never simulated. Chimera's rule (the largest micro-batch that fits, then the best depth and width) goes the same way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import log2

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate, least_plainness, plainness
from raypipe.plan.predict.form import options_of
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges, Sharing, sharing_of
from raypipe.plan.watch import ENDLESS, SearchProgress, Watch
from raypipe.schedule import SCHEDULES
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.shape import Grid

TIE = 1e-6
"""Step times that differ relatively by less than this count as equal: the difference is rounding."""


NEAR = 5e-3
"""The simplest plan within this share of the fastest is chosen. Predictions are no more precise: two profiles of one
machine shift plans against each other by about as much, so the fastest would change from start to start."""


FIRST, FEW_GRIDS = "1f1b", 100
"""The schedule that is ranked alone first, for a plan that rules out most others, where there are more grids."""
RANKING = 0.6
"""Share of the time for a choice that ranking takes at most; the rest is for what is then tried with the best."""


MOST_HOPELESS = 2000
"""Candidates that fit in no order are kept to say why nothing fits; of very many these are enough."""
LATE, AT_ONCE_S = 0.01, 5e-3
"""An order that takes twice as long to make and to time is taken up so much later, as if its bound were longer by this
share; below so many seconds it makes no difference."""
TASK_S, SEARCHED, TURNS = 6e-6, 20, 16
"""Seconds that a task takes. Families that search for their orders take so many times as long. Of a long step,
micro-batches are simulated that are so many times its devices."""


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
    hopeless: list[Candidate] = field(default_factory=list)
    """Candidates that fit in no order, whatever they recompute; the first ``MOST_HOPELESS``."""
    searched: int = 0
    """Grids and candidates that were timed or ruled out."""
    timed: int = 0
    """Candidates whose step was simulated."""
    left: int = 0
    """Grids and candidates that were not tried, because the time was up."""


def rank_key(p: Prediction) -> tuple[object, ...]:
    """Sort key: faster plans first; of equal step times the simpler one, then the one with less memory."""
    return float(f"{p.step_s:.5e}"), p.candidate.simplicity, max(p.memory_bytes)


@no_collection()
def best_first(
    judge: Judges,
    grids: Iterable[Grid],
    top: int,
    pick: Pick = lambda c: c,
    near: float = 0.0,
    watch: Watch = ENDLESS,
    wanted: bool = True,
) -> Ranking:
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
        watch: ends the search early, once it has found a plan.
        wanted: whether it goes on until there is a plan.
    """
    bounded = [(judge.of(grid).least_on(grid), grid) for grid in grids]
    ranking = watch.part(RANKING)
    search = _Search(judge, top, pick, near, wanted=wanted)
    if bounded[FEW_GRIDS:]:
        first = _Search(judge, 1, pick, wanted=wanted, on=lambda grid: [Candidate.on(grid, FIRST)])
        uncut = ((judge.of(grid).least_uncut(Candidate.on(grid, FIRST)), least, grid) for least, grid in bounded)
        first.run(ranking.part(RANKING), [(max(own, least), grid) for own, least, grid in uncut])
        search.fitting |= first.fitting
        search.begun |= first.begun
        search.found.timed += first.found.timed
    search.run(ranking, bounded)
    result, fitting = search.found, search.fitting
    ranked = sorted(fitting.values(), key=rank_key)
    if ranked:
        kept = [p for i, p in enumerate(ranked) if i < top or _shrunk(judge, p) <= ranked[0].step_s * (1 + near)]
        ranked = sorted((p if watch.over else faster_cut(judge, p) for p in kept), key=rank_key)
    result.best = ranked[:top]
    result.near = [p for p in ranked[top:] if p.step_s <= ranked[0].step_s * (1 + near)]
    return result


Node = tuple[float, float, int, Grid]
"""A node in a queue, which is sorted by rank: the rank, a lower bound on the steps that it leads to, when it came."""


@dataclass(slots=True)
class _Search:
    """One search under way."""

    judge: Judges
    top: int
    pick: Pick
    near: float = 0.0
    on: Callable[[Grid], Iterable[Candidate]] | None = None
    """The candidates of a grid that are searched; None: all."""
    wanted: bool = True
    """Whether the search goes on until there is a plan."""
    found: Ranking = field(default_factory=Ranking)
    fitting: dict[object, Prediction] = field(default_factory=dict)
    """Plans that fit, one of those that do the same."""
    grids: list[Node] = field(default_factory=list)
    candidates: dict[Sharing, list[Node]] = field(default_factory=dict)
    """Queues of each way to share layers and experts."""
    begun: set[Sharing] = field(default_factory=set)
    """Ways of which there is a plan."""
    _count: Iterator[int] = field(default_factory=itertools.count)

    @property
    def fastest(self) -> float:
        """The shortest step found; infinite before there is one."""
        return min((p.step_s for p in self.fitting.values()), default=float("inf"))

    def push(self, bound: float, node: Grid) -> None:
        """Queue a node with a lower bound on the steps that it leads to."""
        self.found.searched += 1
        if bound == float("inf"):
            if isinstance(node, Candidate) and len(self.found.hopeless) < MOST_HOPELESS:
                self.found.hopeless.append(node)
        elif isinstance(node, Candidate):
            self._wait(bound, bound, node)
        else:
            heapq.heappush(self.grids, (bound, bound, next(self._count), node))

    @property
    def waiting(self) -> int:
        """Nodes in the queues."""
        return len(self.grids) + sum(map(len, self.candidates.values()))

    @property
    def bound(self) -> float:
        """No plan that is not found yet has a shorter step."""
        grids = [self.grids[0][1]] if self.grids else []
        return min([self.fastest, *grids, *(bound for own in self.candidates.values() for _, bound, _, _ in own)])

    def run(self, watch: Watch, grids: Iterable[tuple[float, Grid]]) -> None:
        """Search these grids, each with its lower bound, until all are ruled out, or there is no time, and a plan where
        one is wanted.

        Once there is a plan, every other turn is that of a candidate that may be faster: in the order of bounds alone,
        all grids would come before most orders. Ways to share layers and experts take these turns one after another, as
        bounds are closer to the steps of some than of others.
        """
        for bound, grid in grids:
            self.push(bound, grid)
        turn = 0
        while queues := [queue for queue in (self.grids, *self.candidates.values()) if queue]:
            queue = min(queues, key=lambda queue: queue[0])
            if turn % 2 and self.fastest < float("inf"):
                promising = [own for own in self.candidates.values() if own and own[0][0] < self.fastest]
                queue = promising[turn // 2 % len(promising)] if promising else queue
            rank, bound, _, node = heapq.heappop(queue)
            if self.beyond(bound, node) or self._later(rank, bound, node):
                continue
            if self.fitting and isinstance(node, Candidate) and effort_s(node) > watch.budget.left:
                self.found.left += 1
                continue
            self.expand(bound, node)
            turn += 1
            watch.show(self.fastest, lambda: SearchProgress(self.waiting, self.fastest, self.bound))
            if watch.over and (self.fitting or not self.wanted):
                self.found.left += self.waiting
                return

    def _later(self, rank: float, bound: float, node: Grid) -> bool:
        """Queue a candidate again if its own bound, with its collectives and the time to make its order, is larger than
        that by which it came up; return whether it is."""
        if not isinstance(node, Candidate) or rank > bound:
            return False
        own = self.judge.of(node).least(node)
        own = max(bound, bound if own == float("inf") else own) * handicap(node)
        if own > rank:
            self._wait(own, bound, node)
        return own > rank

    def _wait(self, rank: float, bound: float, node: Candidate) -> None:
        own = self.candidates.setdefault(sharing_of(node), [])
        heapq.heappush(own, (rank, bound, next(self._count), node))

    def beyond(self, bound: float, node: Grid) -> bool:
        """Return whether no plan with this bound is among the best, or simpler and nearly as fast."""
        if len(self.fitting) < self.top or bound <= _kth(self.fitting.values(), self.top) * (1 + TIE):
            return False
        if bound > self.fastest * (1 + max(self.near, TIE)):
            return True
        return any(p.step_s <= bound and p.plainness <= _plainness(node) for p in self.fitting.values())

    def expand(self, bound: float, node: Grid) -> None:
        """Replace a node by what it leads to: candidates, a plan that fits, or fallbacks."""
        judge, result = self.judge.of(node), self.found
        if not isinstance(node, Candidate):
            for made in (self.on or judge.on)(node):
                candidate = self.pick(made)
                if candidate is not None:
                    self.push(max(bound, self.judge.of(candidate).least_of_all(candidate)), candidate)
            return
        least = judge.least_kept(node)
        fallbacks = judge.unordered(node) if least == float("inf") or self.beyond(least, node) else None
        if fallbacks is None:
            fallbacks = judge.outright(node)
        if fallbacks is not None:
            result.unmade.append(node)
        else:
            try:
                prediction = judge.predict(node)
            except ScheduleError:  # the family has no schedule of this shape
                return
            if prediction.fits:
                result.timed += 1
                self.begun.add(sharing_of(node))
                twin = self.fitting.get(_same(prediction))
                if twin is None or rank_key(prediction) < rank_key(twin):
                    self.fitting[_same(prediction)] = prediction
                return
            result.too_large.append(prediction)
            fallbacks = judge.oom_fallback(prediction)
        for least, other in fallbacks:
            least = max(bound, least) if other.slices == node.slices else least
            if sharing_of(other) in self.begun or other.recompute == "none" or least >= self.fastest:
                self.push(least, other)
            else:  # the first plan of each way to share is wanted at once: what recomputes is most likely to fit
                result.searched += 1
                self.expand(least, other)


def effort_s(c: Candidate) -> float:
    """Estimate the seconds that a candidate's order and step take to find."""
    tasks = 3 * c.form.stages * min(c.microbatches, TURNS * c.stages)
    return TASK_S * tasks * (SEARCHED if SCHEDULES[c.schedule].placement is not None else 1)


def handicap(c: Candidate) -> float:
    """Return the factor by which a candidate's bound counts for more: orders that take long come late."""
    return 1 + LATE * log2(1 + effort_s(c) / AT_ONCE_S)


def _shrunk(judge: Judges, p: Prediction) -> float:
    """An estimate of the plan's step with the faster cut: the step is taken to shrink as its lower bound does."""
    own = judge.of(p.candidate)
    recut = own.recut(p.candidate)
    return p.step_s if recut is None else p.step_s * min(1.0, own.least(recut) / own.least(p.candidate))


def faster_cut(judge: Judges, p: Prediction) -> Prediction:
    """Return the plan with balanced stages or with balanced devices, whichever fits and has the shorter step."""
    own = judge.of(p.candidate)
    recut = own.recut(p.candidate)
    if recut is None or own.least(recut) >= p.step_s:
        return p
    other = own.predict(recut)
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


@no_collection()
def largest_microbatch(judge: Judges, grids: Iterable[Grid], top: int, pick: Pick = lambda c: c) -> Ranking:
    """Return the ``top`` fastest plans, each with the largest micro-batch that fits its schedule, depth and width.

    "It greedily chooses to use the maximum micro-batch size fitting in the device memory", then (W, D) by the
    predicted time. As in the paper, micro-batches that leave fewer than D of them come only where there are no others,
    everything is recomputed (see ``Predictor.partly``) only where nothing fits without,
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
        push(min(judge.of(grid).least_on(grid) for grid in same), same)
        result.searched += 1
    while queue:
        bound, _, node = heapq.heappop(queue)
        if len(result.best) >= top and bound > result.best[top - 1].step_s * (1 + TIE):
            break
        first = node[0]
        if isinstance(first, Candidate):
            chosen = _largest(judge.of(first), node, result)  # type: ignore[arg-type]
            if chosen is not None:
                result.best = sorted([*result.best, chosen], key=rank_key)
            continue
        for kind in _kinds(judge, node, pick):
            push(max(bound, min(judge.of(c).least(c) for c in kind)), kind)
            result.searched += len(kind)
    result.best = sorted((faster_cut(judge, p) for p in result.best[:top]), key=rank_key)
    return result


def _by_shape(grids: Iterable[Grid]) -> list[list[Grid]]:
    """Group grids by depth and width, the largest micro-batch first; keep only those with N >= D if there are any."""
    shapes: dict[Grid, list[Grid]] = {}
    for grid in sorted(grids, key=lambda g: -g.microbatch):
        shapes.setdefault(replace(grid, microbatch=0, microbatches=0), []).append(grid)
    return [[g for g in same if g.microbatches >= g.stages] or same for same in shapes.values()]


def _kinds(judge: Judges, same: Sequence[Grid], pick: Pick) -> Iterable[list[Candidate]]:
    """Group the candidates on these grids by schedule, the largest micro-batch first."""
    kinds: dict[object, list[Candidate]] = {}
    for grid in same:
        for made in judge.of(grid).on(grid):
            c = pick(made)
            if c is not None and _covered(c):
                kinds.setdefault((c.schedule, options_of(c)), []).append(c)
    return kinds.values()


def _covered(c: Candidate) -> bool:
    """Return whether the paper's rule covers the candidate."""
    units = c.concat == "direct" or c.microbatches > c.stages
    return c.unit in (None, c.microbatches) and c.pipelines == 2 and units


def _largest(judge: Predictor, kind: Sequence[Candidate], found: Ranking) -> Prediction | None:
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
