"""Plans for random models on random clusters, played: no device may hold more than it can use.

    python -m tests.bench.accuracy.usable [--pairs N] [--first SEED]

A plan's memory is predicted from closed forms and from shorter steps where its own is long. Here the program of the
plan file itself is played, task by task, and each device's fullest moment is held against the bytes of the described
device that are there to use, reserved memory included. Exit status 1 if one holds more.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from raypipe.errors import SpecError
from raypipe.job import job_from, load_cluster
from raypipe.partition.job_costs import job_profile, shared_profiles
from raypipe.plan.choose import choose
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.tensor_groups import ALONE, sharing_of
from raypipe.plan.watch import Watch
from raypipe.search.budget import Budget
from tests.bench.command import options

ROOT = Path(__file__).parents[3]
GIB = 2**30
DEVICES = ("a100", "h100", "h200", "b200", "v100", "p100", "rtx3090", "h100-96gb")
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SEARCH_S, BUDGET_S = 0.3, 1.5
"""Processor seconds of a choice, and of its search for orders."""


def pair(seed: int) -> tuple[dict[str, object], str, int]:
    """Return a job of a random GPT, and a device with its number."""
    rng = random.Random(seed)
    device, count = rng.choice(DEVICES), rng.choice(COUNTS)
    heads = rng.choice((8, 16, 32, 64))
    dtype = rng.choice(("bfloat16-true", "bfloat16")) if device not in ("v100", "p100") else "float32"
    job = {
        "name": "random", "data": {"type": "bytes", "path": "stdlib"}, "parallel": {"auto": True},
        "model": {
            "layers": rng.randint(2, 64), "hidden": heads * rng.choice((64, 96, 128)), "heads": heads,
            "sequence": rng.choice((512, 1024, 2048, 4096, 8192)), "vocabulary": rng.choice((256, 32_000, 128_256)),
            "tie_embeddings": rng.random() < 0.5,
        },
        "train": {
            "steps": 1, "batch": count * rng.choice((1, 2, 4, 8)), "dtype": dtype, "clip": rng.choice((None, 1.0)),
            "optimizer": rng.choice(("adamw", "adamw", "sgd")),
        },
    }  # fmt: skip
    return job, device, count


def main() -> int:
    args = options(__doc__, pairs=200, first=0)
    began, played, none, worst, over = time.process_time(), 0, 0, 0.0, 0
    for seed in range(args.first, args.first + args.pairs):
        given, device, count = pair(seed)
        job = job_from(given)
        cluster = load_cluster(ROOT / "cluster" / "devices" / f"{device}.yaml").resized(count)
        profile, shared = job_profile(job, cluster), shared_profiles(job, cluster)
        try:
            plan = choose(
                job, profile, top=1, search_s=SEARCH_S, shared=shared, watch=Watch(Budget(BUDGET_S))
            ).plan  # fmt: skip
        except SpecError:
            none += 1
            continue
        p = plan.parallel
        result = PlanPredictor(job, {ALONE: profile, **shared}[sharing_of(p)]).predict(plan)
        shares = [one.total / room for one, room in zip(result.memory, result.capacities, strict=True)]
        played, worst = played + 1, max(worst, *shares)
        if max(shares) > 1:
            over += 1
            shape = f"{p.schedule} {p.stages} x {p.replicas} x {p.tensor}, {p.shard}, recompute {p.recompute}"
            print(f"{seed} on {count} {device}: {shape}: {max(shares):.2%} of what a device can use", flush=True)
    print(
        f"{played} plans played, {over} over; the fullest device holds {worst:.2%} of what it can use; {none} models "
        f"fit nowhere; {time.process_time() - began:.0f} s of processor time"
    )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
