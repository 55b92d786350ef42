"""The portfolio of settings for list scheduling, and random variations of them."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple, get_args

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import BACKWARD, GRADIENTS, JOINT
from raypipe.schedule.passes import add_recompute, fuse_backward, split_backward, without_frozen
from raypipe.schedule.shape import Concat, Shape
from raypipe.search.list_scheduling import LaneArrays, Reserve, Setting, floats, ints
from raypipe.search.problem import DeviceOrders, Problem, lane_order

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
    order = lane_order(p)
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
    for c in reversed(lane_order(p)):
        down[c] = p.time[c] + max((down[e] + lag for e, lag in p.after[c]), default=0.0)
    return down


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


# Published schedules as starting points, so that the search never returns an order worse than the best of them.
#
# Beside the families' schedules it is the zero-bubble paper's heuristic for a line of stages, which alternates forwards
# and backwards (``alternating``). List scheduling has fixed priorities and rarely finds such orders where stages
# are very uneven.
#
# Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 3.1.


class Choice(NamedTuple):
    """The three choices that the heuristic leaves open."""

    more_warm_up: bool
    """Fill the memory with forwards even if that delays the first backward; else each stage starts one forward fewer
    than the stage before."""
    backward_first: bool
    """After warm-up, prefer a ready backward over the forward whose turn it is."""
    any_gap: bool
    """Start a weight gradient even in a gap that is too short for it."""


def alternating(p: Problem) -> Iterator[DeviceOrders]:
    """Yield one order per choice.

    Yields nothing unless the problem is a line with one stage per device, split backwards and no recomputation.
    """
    line = [(kind, d, 0) for d in range(p.devices) for kind in ("F", "B", "W")]
    if list(zip(p.kind, p.stage, p.replica, strict=True)) != line or p.device != [d for _, d, _ in line]:
        return
    if p.graph != StageGraph.chain(p.devices):
        return
    for choice in itertools.product((False, True), repeat=3):
        orders = _order(p, Choice(*choice))
        if orders is not None:
            yield orders


def _order(p: Problem, choice: Choice) -> DeviceOrders | None:
    """Warm up, then alternate forwards and backwards; run a weight gradient where it fits a gap or memory is full."""
    never, count, depth = float("inf"), p.microbatches, p.devices
    forwards = [[0.0 if d == 0 else never] * count for d in range(depth)]
    """Per device, when the forward of a micro-batch may start."""
    backwards = [[never] * count for _ in range(depth)]
    lag = [next((lag for e, lag in p.after[3 * d] if p.device[e] == d + 1), 0.0) for d in range(depth)]
    orders: DeviceOrders = [[] for _ in range(depth)]
    done = [[0, 0, 0] for _ in range(depth)]
    live, end = [0.0] * depth, [0.0] * depth
    last_was_forward = [False] * depth
    events = [(0.0, d) for d in range(depth)]
    while events:
        now, d = heapq.heappop(events)
        if now < end[d]:
            continue
        nf, nb, nw = done[d]
        most = max(1.0, min(p.cap[d], float(count)) - d)
        room = live[d] + p.takes[3 * d] <= p.cap[d] + 1e-9 and (choice.more_warm_up or nf - nb < most)
        forward = forwards[d][nf] if nf < count and room else never
        backward = backwards[d][nb] if nb < nf else never
        kind = -1
        if nb == 0 and forward <= now and (choice.more_warm_up or backward > now):
            kind = 0
        else:
            turn = not last_was_forward[d] and nf < count and not (choice.backward_first and backward <= now)
            turn = turn and forward < never
            wanted, other = (forward, backward) if turn else (backward, forward)
            soon = min(wanted, other)
            if wanted <= now:
                kind = 0 if turn else 1
            elif nb > nw and (choice.any_gap or soon >= now + p.time[3 * d + 2] or forward == never):
                kind = 2
            elif other <= now:
                kind = 1 if turn else 0
            elif soon < never:
                heapq.heappush(events, (soon, d))
        if kind < 0:
            continue
        c, m = 3 * d + kind, done[d][kind]
        done[d][kind] += 1
        orders[d].append(p.base[c] + m)
        live[d] += p.takes[c] - p.frees[c]
        end[d] = now + p.time[c]
        if kind == 0 and d + 1 < depth:
            forwards[d + 1][m] = end[d] + lag[d]
            heapq.heappush(events, (max(forwards[d + 1][m], end[d + 1]), d + 1))
        elif kind == 0:
            backwards[d][m] = end[d]
        elif kind == 1 and d:
            backwards[d - 1][m] = end[d] + lag[d - 1]
            heapq.heappush(events, (max(backwards[d - 1][m], end[d - 1]), d - 1))
        if kind < 2:
            last_was_forward[d] = kind == 0
        heapq.heappush(events, (end[d], d))
    return orders if all(row == [count] * 3 for row in done) else None


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
