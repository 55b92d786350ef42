"""How long the search takes as steps grow, and how far from the bound it ends. One process on one core."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, list_schedule
from raypipe.search.order_walk import shortened
from raypipe.search.priorities import portfolio
from raypipe.search.problem import build
from tests.bench.search.line import Effort, Line

SIZES = ((4, 16), (8, 32), (16, 64), (32, 128), (64, 256))
"""Devices and micro-batches: from 192 tasks to 49,152."""
SPREAD = 8.0
"""Most that a task of one step may take over a task of another; were either quadratic, it would be 256."""


def speed(effort: Effort) -> Iterator[Line]:
    """One pass: one list schedule. One move of the walk: all times anew. Both should be linear in tasks.
    Then whole searches with the default budget, in 1F1B's memory and in half of it."""
    yield Line("D x N    tasks        build s  pass s  us/task  move ms  us/task   1F1B's memory        half of it")
    passes, moves_of = [], []
    for depth, count in SIZES[: effort.count]:
        rng = random.Random(depth)
        times = [tuple(t * rng.uniform(1, 1.25) for _ in range(depth)) for t in (10, 12, 8)]
        costs = CostTable(forward=times[0], input_grad=times[1], weight_grad=times[2], comm=1)
        line = (tuple(range(depth)),)
        at = time.perf_counter()
        problem = build(line, count, costs, memory_limit=depth)
        layout = LaneArrays.of(problem)
        built = time.perf_counter() - at
        at = time.perf_counter()
        listed = list_schedule(layout, next(portfolio(problem)))
        assert listed is not None
        one_pass = time.perf_counter() - at
        moves = max(100, 20_000_000 // problem.tasks)
        at = time.perf_counter()
        shortened(layout, listed.orders, 0.0, Budget(math.inf), random.Random(0), moves)
        one_move = (time.perf_counter() - at) / moves
        ends = []
        for memory in (depth, depth // 2):
            result = search(line, count, costs, memory_limit=memory)
            ends.append(f"{result.gap:6.2%} in {result.seconds:5.2f} s")
        n = problem.tasks
        passes.append(1e6 * one_pass / n)
        moves_of.append(1e6 * one_move / n)
        text = (
            f"{depth:>2} x {count:<4} {n:>6} {built:>13.3f} {one_pass:>7.3f} {passes[-1]:>8.2f} "
            f"{1e3 * one_move:>8.2f} {moves_of[-1]:>8.2f}   {'   '.join(ends)}"
        )
        yield Line(text)
    for what, each in (("pass", passes), ("move", moves_of)):
        spread = max(each) / min(each)
        yield Line(f"one {what}: a task takes {spread:.1f} times as long in one step as in another", spread, SPREAD)
