"""``auto`` against exact optima on random small instances of every placement.

Run: ``python -m tests.bench.auto_exact [--instances N] [--budget SECONDS] [--first SEED]``. Instances that constraint
programming does not solve in 20 s are counted against its bound, which overstates the gap.
"""

from __future__ import annotations

import argparse
import time

from raypipe.search.budget import Budget
from tests.search.conftest import random_case
from tests.search.judge import judge


def run(instances: int, budget: float, first: int) -> None:
    """Print every instance that isn't optimal, then mean and worst."""
    gaps, unsolved, began = [], 0, time.monotonic()
    for seed in range(first, first + instances):
        case = random_case(seed)
        found = case.search(budget=Budget(budget))
        if found.gap <= 1e-9:
            gaps.append(0.0)
            continue
        verdict = judge(
            case.placement, case.count, case.forward, case.input_grad, case.weight_grad, case.latency, case.memory,
            case.split, seconds=20, hint=round(found.value),
        )  # fmt: skip
        assert found.bound <= verdict.makespan, "the bound is above a possible makespan"
        unsolved += verdict.makespan != verdict.bound
        gaps.append(found.value / max(verdict.bound, found.bound) - 1)
        if gaps[-1] > 1e-9:
            print(seed, case, f"found {found.value:g}, judge {verdict.makespan} >= {verdict.bound}", flush=True)
    print(
        f"{len(gaps)} instances, {unsolved} unsolved: mean gap {sum(gaps) / len(gaps):.3%}, worst {max(gaps):.2%}, "
        f"{sum(g <= 1e-9 for g in gaps)} optimal, {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auto_exact", description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--budget", type=float, default=2.5, help="seconds of processor time of a search")
    parser.add_argument("--first", type=int, default=1000, help="seed of the first instance")
    args = parser.parse_args()
    run(args.instances, args.budget, args.first)
