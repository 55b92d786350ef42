"""How long the search takes as steps grow, and how far from the bound it ends.

Run: ``python -m tests.bench.auto_speed``. One process on one core. One pass: one list schedule; one move: of the local
search, heads and tails anew. Both should be linear in tasks. Then whole searches with the default budget, in 1F1B's
memory and in half of it.
"""

from __future__ import annotations

import argparse
import math
import random
import time

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import Layout, list_schedule
from raypipe.search.priorities import portfolio
from raypipe.search.problem import build
from raypipe.search.tabu import improve


def run() -> None:
    """Print the curve."""
    print("   D x N    tasks        build s  pass s  us/task  move ms  us/task   1F1B's memory        half of it")
    for depth, count in ((4, 16), (8, 32), (16, 64), (32, 128), (64, 256)):
        rng = random.Random(depth)
        times = [tuple(t * rng.uniform(1, 1.25) for _ in range(depth)) for t in (10, 12, 8)]
        zeros = (0.0,) * depth
        costs = CostTable(
            forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros,
            update=zeros, comm=1,
        )  # fmt: skip
        line = (tuple(range(depth)),)
        at = time.perf_counter()
        problem = build(line, count, costs, memory_limit=depth)
        layout = Layout.of(problem)
        built = time.perf_counter() - at
        at = time.perf_counter()
        listed = list_schedule(layout, next(portfolio(problem)))
        assert listed is not None
        one_pass = time.perf_counter() - at
        moves = max(20, 200_000 // problem.tasks)
        at = time.perf_counter()
        improve(problem, listed.words, 0.0, Budget(math.inf), random.Random(0), moves)
        one_move = (time.perf_counter() - at) / moves
        ends = []
        for memory in (depth, depth // 2):
            found = search(line, count, costs, memory_limit=memory)
            ends.append(f"{found.gap:6.2%} in {found.seconds:5.2f} s")
        n = problem.tasks
        print(
            f"{depth:>4} x {count:<4} {n:>6} {built:>13.3f} {one_pass:>7.3f} {1e6 * one_pass / n:>8.2f} "
            f"{1e3 * one_move:>8.2f} {1e6 * one_move / n:>8.2f}   {'   '.join(ends)}",
            flush=True,
        )


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.bench.auto_speed", description=__doc__).parse_args()
    run()
