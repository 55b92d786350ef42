"""How long the planner takes as the cluster, the model or the mini-batch grows.

    python -m tests.bench.search.planner_speed [MOST_DEVICES] [LAYERS]   # devices 8 ... 16,384, one sample each
    python -m tests.bench.search.planner_speed layers [DEVICES] [MOST]   # layers 64 ... MOST [256] on DEVICES [2,048]
    python -m tests.bench.search.planner_speed batch [DEVICES=8] [MOST]  # batches 256, 4,096 ... MOST [1,048,576]

Chimera's 64-layer GPT-2, one sample a device (weak scaling, as in its Figure 1) on P100 nodes, all families, with and
without a global gradient norm; mini-batches of more samples on A100. One core: the search is single-threaded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from raypipe.cost.analytic import analytic_profile
from raypipe.job import load_cluster, load_job
from raypipe.job.model_spec import GptSpec
from raypipe.plan.choose import choose
from raypipe.plan.reasons import gib

ROOT = Path(__file__).parents[3]


def main(most: int, layers: int) -> None:
    """Print one line per number of devices."""
    head()
    devices = 8
    while devices <= most:
        for clip in ("null", "1.0"):
            line("p100", devices, layers, devices, clip)
        devices *= 4 if devices in (8, 32) else 2 if devices < 2048 else 8


def grow_layers(devices: int, most: int) -> None:
    """Print one line per depth of the model."""
    head()
    layers = 64
    while layers <= most:
        for clip in ("null", "1.0"):
            line("p100", devices, layers, devices, clip)
        layers *= 2


def grow_batch(devices: int, most: int) -> None:
    """Print one line per mini-batch: powers of two, which have many divisors, and a prime, which has none."""
    head()
    batch = 256
    while batch <= most:
        line("a100", devices, 64, batch, "null")
        batch *= 16
    line("a100", devices, 64, next(n for n in range(most - 1, 1, -1) if is_prime(n)), "null")


def is_prime(n: int) -> bool:
    """Whether only 1 and n divide it."""
    return all(n % k for k in range(2, int(n**0.5) + 1))


def head() -> None:
    """Print the names of the columns."""
    print(
        f"{'devices':>8} {'layers':>6} {'batch':>9} {'clip':>5} {'seconds':>8} {'processor':>9} {'candidates':>11} "
        f"{'simulated':>9}  chosen"
    )


def line(machine: str, devices: int, layers: int, batch: int, clip: str) -> None:
    """Plan once and print how long it took."""
    changes = [f"train.batch={batch}", f"train.clip={clip}", f"model.layers={layers}"]
    job = load_job(ROOT / "jobs" / "gpt2-1.3b.yaml", changes)
    assert isinstance(job.model, GptSpec)
    began, used = time.monotonic(), time.process_time()
    cluster = load_cluster(ROOT / "cluster" / "devices" / f"{machine}.yaml").resized(devices)
    profile = analytic_profile(
        job.model, cluster, job.train.dtype, optimizer=job.train.optimizer, momentum=job.train.momentum > 0
    )
    decision = choose(job, profile, search_s=0)
    best = decision.best
    c = best.candidate
    print(
        f"{devices:>8} {layers:>6} {batch:>9} {clip:>5} {time.monotonic() - began:>8.1f} "
        f"{time.process_time() - used:>9.1f} {decision.searched:>11,} {decision.timed:>9,}  {c.schedule}, "
        f"{c.stages} x {c.replicas}, B = {c.microbatch}, {best.step_s:.3f} s, {gib(max(best.memory_bytes))}",
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.search.planner_speed", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="WORD")
    words = parser.parse_args().words
    if words[:1] == ["layers"]:
        grow_layers(*(*map(int, words[1:]), *(2048, 256)[len(words) - 1 :]))
    elif words[:1] == ["batch"]:
        grow_batch(*(*map(int, words[1:]), *(8, 1_048_576)[len(words) - 1 :]))
    else:
        main(*(*map(int, words), *(16384, 64)[len(words) :]))
