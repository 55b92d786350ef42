"""How long the planner takes as the cluster grows: ``python -m tests.bench.planner_speed [MOST_DEVICES] [LAYERS]``.

Chimera's 64-layer GPT-2, one sample a device (weak scaling, as in its Figure 1) on P100 nodes, all families, with and
without a global gradient norm. One core: the search is single-threaded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from raypipe.cost.analytic import analytic_profile
from raypipe.job import load_cluster, load_job
from raypipe.job.model_spec import GptSpec
from raypipe.plan.choose import choose
from raypipe.plan.explain import gib

ROOT = Path(__file__).parents[2]


def main(most: int, layers: int) -> None:
    """Print one line per number of devices."""
    print(f"{'devices':>8} {'clip':>5} {'seconds':>8} {'processor':>9} {'candidates':>11} {'simulated':>9}  chosen")
    devices = 8
    while devices <= most:
        for clip in ("null", "1.0"):
            changes = [f"train.batch={devices}", f"train.clip={clip}", f"model.layers={layers}"]
            job = load_job(ROOT / "jobs" / "gpt2-1.3b.yaml", changes)
            assert isinstance(job.model, GptSpec)
            began, used = time.monotonic(), time.process_time()
            cluster = load_cluster(ROOT / "cluster" / "p100.yaml").resized(devices)
            profile = analytic_profile(
                job.model, cluster, job.train.dtype, optimizer=job.train.optimizer, momentum=job.train.momentum > 0
            )
            decision = choose(job, profile, search_s=0)
            best = decision.best
            c = best.candidate
            print(
                f"{devices:>8} {clip:>5} {time.monotonic() - began:>8.1f} {time.process_time() - used:>9.1f} "
                f"{decision.searched:>11,} {decision.timed:>9,}  {c.schedule}, {c.stages} x {c.replicas}, "
                f"B = {c.microbatch}, {best.step_s:.3f} s, {gib(max(best.memory_bytes))}",
                flush=True,
            )  # fmt: skip
        devices *= 4 if devices in (8, 32) else 2 if devices < 2048 else 8


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(16384, 64)[len(given) :])
