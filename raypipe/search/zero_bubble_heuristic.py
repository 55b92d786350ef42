"""The zero-bubble paper's heuristic for a line of stages.

It alternates forwards and backwards. List scheduling has fixed priorities and rarely finds such orders where stages
are very uneven.

Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 3.1.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from raypipe.schedule.ir import StageGraph
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
