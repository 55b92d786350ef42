"""The portfolio of settings for list scheduling, and random variations of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from raypipe.schedule.kinds import BACKWARD, GRADIENTS
from raypipe.search.list_scheduling import LaneArrays, Reserve, Setting, floats, ints
from raypipe.search.problem import Problem

ORDERS = (("F", "B", "W"), ("B", "F", "W"), ("B", "W", "F"), ("W", "B", "F"))
"""Kinds from the highest to the lowest priority; BW counts as B, and R comes before all."""
_PATIENCE_AND_KINDS = tuple(
    (patience, kinds) for pair in (ORDERS[:2], ORDERS[2:]) for patience in (0.5, 0.0, 1.0) for kinds in pair
)
"""Pairs of patience and kinds, those that win most often first."""


class Pace(NamedTuple):
    """Settings by which due dates are made; see ``paced``."""

    ahead: float
    """Times the way to the end, by which a forward is due earlier: how far forwards run ahead."""
    back: float
    """The same for input gradients."""
    lead: float
    """Paces by which input gradients are due earlier still."""
    wait: float
    """Paces after which weight gradients are due."""
    patience: float
    """Share of a weight gradient's time to stay idle for a better task."""


PACES = tuple(
    Pace(*numbers)
    for numbers in (
        (3.0, 3.0, 1.0, 4.0, 0.0),
        (3.0, 1.5, 4.0, 16.0, 0.0),
        (4.0, 4.0, 0.0, 16.0, 0.0),
        (3.0, 0.0, 0.0, 1.0, 0.0),
        (2.0, 0.0, 0.0, 8.0, 0.0),
        (2.0, 1.0, 4.0, 1000.0, 0.5),
        (4.0, 2.0, 8.0, 2.0, 0.0),
        (4.0, 1.0, 8.0, 4.0, 0.0),
    )
)
"""Those that did best on random models whose devices hold several unequal stages."""

_SAFE_UP_TO = 1500
"""Up to this many tasks there is time for ``reserve="safe"``."""


def portfolio(p: Problem) -> Iterator[Setting]:
    """Yield a few hundred settings, the most promising first.

    They differ in the priority of kinds, in how long a device stays idle for a better task, in how far forwards run
    ahead at each stage, and in which of several stages of a device goes first.
    """
    if _several(p):
        layout = LaneArrays.of(p)
        for numbers in PACES:
            yield paced(layout, numbers)
    leads = list(_leads(p))
    for patience, kinds in _PATIENCE_AND_KINDS:
        for lead in leads:
            for keys, pace in _keys(p, kinds):
                yield Setting(keys, pace, _patience(p, patience), lead)
    if _several(p) and min(p.cap) < math.inf:
        if p.tasks <= _SAFE_UP_TO:
            for patience, kinds in _PATIENCE_AND_KINDS[:4]:
                for lead in leads:
                    for keys, pace in _keys(p, kinds):
                        yield Setting(keys, pace, _patience(p, patience), lead, "safe")
        for kinds in ORDERS:  # without reserves devices may deadlock; where they do not, orders are shorter
            for keys, pace in _keys(p, kinds):
                yield Setting(keys, pace, reserve="none")


def _several(p: Problem) -> bool:
    """Return whether some device holds more than one stage."""
    return any(len({(p.stage[c], p.replica[c]) for c in own}) > 1 for own in p.lanes_of)


def _patience(p: Problem, share: float) -> tuple[float, ...]:
    if not share:
        return ()
    return tuple(share * p.time[c] if p.kind[c] == "W" else 0.0 for c in range(len(p.kind)))


def _keys(p: Problem, kinds: tuple[str, str, str]) -> Iterator[tuple[tuple[float, ...], float]]:
    """Priorities by kind; among the stages of one device, by micro-batch, by the nearest end, or by the farthest."""
    lanes = range(len(p.kind))
    stages = p.graph.stages
    big = 1e6

    def rank(c: int) -> float:
        kind = "B" if p.kind[c] in BACKWARD else p.kind[c]
        return -big if kind == "R" else big * kinds.index(kind)

    # How far a task is from its micro-batch's end: backwards run towards stage 0.
    to_end = [p.stage[c] if p.kind[c] not in ("F", "R") else stages - p.stage[c] for c in lanes]
    if not _several(p):
        yield tuple(map(rank, lanes)), 0.0
        return
    yield tuple(rank(c) + to_end[c] / (2 * stages) for c in lanes), 1.0
    yield tuple(rank(c) + to_end[c] for c in lanes), 1 / (p.microbatches + 1)
    yield tuple(rank(c) - to_end[c] for c in lanes), 1 / (p.microbatches + 1)
    if kinds == ORDERS[1]:  # older micro-batches before everything, so that replicas and stages alternate
        yield tuple((0.0 if rank(c) < big else 0.5) + to_end[c] / (2 * stages) for c in lanes), 1.0


def paced(layout: LaneArrays, numbers: Pace) -> Setting:
    """Every task has a due date: micro-batches follow one another at the pace of the busiest device, and each is due
    the earlier, the longer the way that it still has to go.

    Where micro-batches run at a steady pace, the task of micro-batch m may start ``m * pace - (its way to the end)``
    after a fixed moment and be in time. What is farthest from its end thus runs first, be it the oldest micro-batch or
    a new one's forward; no fixed number says how far forwards run ahead.
    """
    from raypipe.search.list_kernel import due_dates

    key, pace, patience = due_dates(layout.flat, layout.kind, ints(layout.in_turn), floats(numbers))
    return Setting(tuple(key.tolist()), pace, tuple(patience.tolist()) if numbers.patience else ())


def _leads(p: Problem) -> Iterator[tuple[float, ...]]:
    """Values for ``Setting.ahead``: per lane, how many forwards it may run ahead, scaled with the device's memory."""
    lanes = range(len(p.kind))
    stages = p.graph.stages
    yield ()
    share = [0.0] * len(p.kind)
    for own in p.lanes_of:
        several = len({(p.stage[c], p.replica[c]) for c in own})
        for c in own:
            share[c] = 1.0 / max(1, several)
    cap = [min(p.cap[p.device[c]], float(p.microbatches)) for c in lanes]

    def round_up(value: float) -> float:
        return float(max(1, math.ceil(value - 1e-9)))

    waits = _until_backward(p)
    for rounded in (math.floor, math.ceil):  # as many as fit before the first backward, and one more that delays it
        yield tuple(max(1.0, min(math.floor(cap[c]), float(rounded(waits[c] + 1e-9)))) for c in lanes)
    trips = _round_trips(p)
    top = max(trips) or 1.0
    for step in (1.0, 0.5, 2.0):
        yield tuple(round_up(cap[c] - step * p.stage[c]) for c in lanes)
    for full in (1.0, 0.75, 1.5):
        yield tuple(round_up(full * cap[c] * trips[c] / top) for c in lanes)
    if any(s < 1 for s in share):
        for full in (1.0, 1.5):
            yield tuple(round_up(full * cap[c] * share[c]) for c in lanes)
        for slope in (0.5, 1.0):
            yield tuple(
                round_up(cap[c] * share[c] * (1 + slope * (stages - 1 - 2 * p.stage[c]) / stages)) for c in lanes
            )
    entries = {c for c in lanes if not p.before[c]}
    for limit in sorted({1, 2, 3, *(math.ceil(min(cap) * k / 8) for k in range(2, 8))}):
        if limit < min(cap):  # few micro-batches in flight: long orders, but far from deadlock and good starts
            yield tuple(float(limit) if c in entries else cap[c] for c in lanes)


def _until_backward(p: Problem) -> list[float]:
    """Per F lane, the least time from its start to the start of its stage's backward.

    The unit is one forward of each stage that the device holds.
    """
    result = [1.0] * len(p.kind)
    order = sorted(range(len(p.kind)), key=_depth(p).__getitem__)
    for own in p.lanes_of:
        forwards = [c for c in own if p.kind[c] == "F"]
        for f in forwards:
            back = [c for c in own if p.kind[c] in GRADIENTS and p.stage[c] == p.stage[f]]
            back = [c for c in back if p.replica[c] == p.replica[f]]
            start = {f: 0.0}
            for c in order:
                ready = [start[e] + p.time[e] + lag for e, lag in p.before[c] if e in start]
                if ready and c != f:
                    start[c] = max(ready)
            pace = sum(p.time[c] for c in forwards)
            if pace:
                result[f] = min((start[c] for c in back), default=pace) / pace
    return result


def _round_trips(p: Problem) -> list[float]:
    """Per lane, the longest path from its start to the end of a micro-batch."""
    down = [0.0] * len(p.kind)
    depth = _depth(p)
    for c in sorted(range(len(p.kind)), key=lambda c: -depth[c]):
        down[c] = p.time[c] + max((down[e] + lag for e, lag in p.after[c]), default=0.0)
    return down


def _depth(p: Problem) -> list[int]:
    """Per lane, the number of lanes on the longest chain before it."""
    depth = [-1] * len(p.kind)

    def of(c: int) -> int:
        if depth[c] < 0:
            depth[c] = 1 + max((of(b) for b, _ in p.before[c]), default=-1)
        return depth[c]

    for c in range(len(p.kind)):
        of(c)
    return depth


def shaken(p: Problem, setting: Setting, rng: random.Random) -> Setting:
    """Perturb a setting: its ``ahead`` and patience a little, now and then its ``ahead`` or priorities entirely."""
    lanes = range(len(p.kind))
    reserves: tuple[Reserve, ...] = ("stages", "safe", "none") if p.tasks <= _SAFE_UP_TO else ("stages", "none")
    if rng.random() < 0.25:
        most = min(max(p.cap), float(p.microbatches))
        drawn = tuple(float(rng.randint(1, max(1, int(most)))) for _ in lanes)
        return Setting(setting.key, setting.pace, setting.patience, drawn, setting.reserve)
    ahead = setting.ahead or tuple(min(p.cap[p.device[c]], float(p.microbatches)) for c in lanes)
    changed = list(ahead)
    for c in lanes:
        if p.takes[c] and rng.random() < 0.3:
            changed[c] = max(1.0, changed[c] + rng.choice((-1.0, 1.0)))
    patience = setting.patience or (0.0,) * len(p.kind)
    if rng.random() < 0.5:
        patience = tuple(
            rng.choice((0.0, 0.25, 0.5, 1.0)) * p.time[c] if rng.random() < 0.3 else patience[c] for c in lanes
        )
    key, pace = setting.key, setting.pace
    if rng.random() < 0.3:  # priority by micro-batch instead of kind, shifted by a random number per lane or replica
        shift = [rng.uniform(0.0, 4.0) for _ in lanes]
        by_replica = rng.random() < 0.5
        key = tuple(shift[p.replica[c]] - (p.kind[c] in BACKWARD) if by_replica else shift[c] for c in lanes)
        pace = 1.0
    return Setting(key, pace, patience, tuple(changed), setting.reserve if rng.random() < 0.8 else rng.choice(reserves))
