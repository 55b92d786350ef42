"""Published schedules as starting points, so that the search never returns an order worse than the best of them.

Beside the families' schedules it is the zero-bubble paper's heuristic for a line of stages, which alternates forwards
and backwards (``alternating``). List scheduling has fixed priorities and rarely finds such orders where stages
are very uneven.

Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 3.1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, get_args

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.passes import add_recompute, fuse_backward, split_backward, without_frozen
from raypipe.schedule.shape import Concat, Shape
from raypipe.search.problem import DeviceOrders, Problem


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
