"""Uneven stages on a line: ``auto`` against its bound and against the zero-bubble heuristic.

Run: ``python -m tests.bench.auto_uneven [--cases N] [--budget SECONDS]``. Stages uneven by up to 25 %, D = 4..16,
N = D..4D, in 1F1B's memory, in half of it and in twice as much.
"""

from __future__ import annotations

import argparse
import random

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.search.budget import Budget
from tests.bench.zero_bubble_heuristic import shortest


def run(cases: int, budget: float, first: int) -> None:
    """Print one line a case and the means."""
    totals: dict[str, list[tuple[float, float]]] = {}
    for seed in range(first, first + cases):
        rng = random.Random(seed)
        depth = rng.choice((4, 5, 6, 8, 10, 12, 16))
        count = rng.randint(depth, 4 * depth)
        share = ("half", "same", "twice")[seed % 3]
        memory = {"half": max(1, depth // 2), "same": depth, "twice": 2 * depth}[share]
        base = rng.choice(((10, 10, 10), (10, 12, 8), (10, 20, 10)))
        times = [tuple(t * rng.uniform(1, 1.25) for _ in range(depth)) for t in base]
        zeros = (0.0,) * depth
        costs = CostTable(
            forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros,
            update=zeros, comm=rng.choice((0, 1, 2)),
        )  # fmt: skip
        found = search((tuple(range(depth)),), count, costs, memory_limit=memory, budget=Budget(budget))
        other = shortest(depth, count, costs, memory)
        totals.setdefault(share, []).append((found.gap, other / found.value - 1))
        print(
            f"D={depth:<2} N={count:<2} memory {memory:<2} ({share:5}) auto {found.value:8.1f} gap {found.gap:6.2%} "
            f"heuristic {other / found.value - 1:+7.2%} in {found.seconds:.2f} s",
            flush=True,
        )
        assert found.value <= other * (1 + 1e-9), "the heuristic found a shorter order"
    for share, rows in sorted(totals.items()):
        gaps, leads = zip(*rows, strict=True)
        print(f"{share:5}: mean gap {sum(gaps) / len(gaps):.3%}, heuristic longer by {sum(leads) / len(leads):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auto_uneven", description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of processor time of a search")
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    args = parser.parse_args()
    run(args.cases, args.budget, args.first)
