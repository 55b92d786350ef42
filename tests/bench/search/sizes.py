"""How long the planner takes for models that people train, on the clusters they have.

    python -m tests.bench.search.sizes [CASE ...]     # every case in a process of its own

Processor seconds of the whole process until the costs are known, to the first plan and to the end, its peak memory, and
the step that it chose. Where nothing is stored, a model of Hugging Face's is captured while its costs are made.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
CASES: dict[str, tuple[str, str, int, list[str]]] = {
    "8b-8": ("llama3-8b", "h100", 8, []),
    "8b-128": ("llama3-8b", "h100", 128, ["train.batch=256"]),
    "70b-64": ("llama3-70b", "h100", 64, []),
    "70b-256": ("llama3-70b", "h100", 256, []),
    "gpt3-128": ("gpt3-175b", "h100", 128, []),
    "qwen3-8": ("qwen3-30b-a3b", "h100", 8, []),
    "128-layers": ("gpt2-1.3b", "p100", 2048, ["model.layers=128", "train.batch=2048"]),
    "512-layers": ("gpt2-1.3b", "a100", 64, ["model.layers=512", "train.batch=512"]),
    "v3-256": ("deepseek-v3", "h100", 256, []),
    "v3-1024": ("deepseek-v3", "h100", 1024, []),
    "405b-512": ("llama3-405b", "h100", 512, []),
    "405b-1024": ("llama3-405b", "h100", 1024, ["train.batch=512"]),
}
"""Job, device, how many of them, and changes to the job."""
SECONDS = float(os.environ.get("SECONDS", "10"))
"""Budget of each choice."""


def plan(name: str) -> None:
    """Plan one case, and print its line."""
    from raypipe.job import load_cluster, load_job
    from raypipe.partition.job_costs import job_profile, shared_profiles
    from raypipe.plan.choose import choose
    from raypipe.plan.watch import SearchProgress, Watch
    from raypipe.search.budget import Budget

    file, device, count, changes = CASES[name]
    job = load_job(ROOT / "jobs" / f"{file}.yaml", changes)
    cluster = load_cluster(ROOT / "cluster" / "devices" / f"{device}.yaml").resized(count)
    profile, shared = job_profile(job, cluster), shared_profiles(job, cluster)
    costed, first = time.process_time(), 0.0

    def show(progress: SearchProgress) -> None:
        nonlocal first
        if not first and progress.best_s < float("inf"):
            first = time.process_time()

    decision = choose(job, profile, shared=shared, watch=Watch(Budget(SECONDS), show))
    end, best = time.process_time(), decision.best
    c = best.candidate
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:<11} {costed:>6.1f} {first or end:>6.1f} {end:>6.1f} {peak:>6.0f} {best.step_s:>9.4f}  "
        f"{decision.searched:>9,} {decision.timed:>6,}  {c.schedule} {c.stages} x {c.replicas} x {c.tensor}, "
        f"B = {c.microbatch}, V = {c.chunks}, {c.shard}, {c.recompute}, slices {c.slices}",
        flush=True,
    )


def main(names: list[str]) -> None:
    """Print one line per case."""
    print(f"{'case':<11} {'costs':>6} {'first':>6} {'end':>6} {'MiB':>6} {'step s':>9}  {'searched':>9} {'timed':>6}")
    for name in names or CASES:
        program = f"from tests.bench.search.sizes import plan; plan({name!r})"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)


if __name__ == "__main__":
    main(sys.argv[1:])
