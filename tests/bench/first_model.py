"""The first model of a user: GPT-2 of 124M parameters on this machine, planned by ``parallel: auto`` and by hand.

    python -m tests.bench.first_model [--steps K]

The model is saved by transformers' save_pretrained with random weights; sequence 256, mini-batches of 8. The first run
has no caches, nor the planner's compiled kernels, and plans: seconds from the command to the beginning of its first
step (its first row less the step that it reports), and its median step. Then what one would try by hand is timed: one
process, data parallelism, pipelines. The last line has the ratio of auto's step to the best of them. Takes about half
an hour.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.command import options
from tests.bench.first_steps import first_step_s

BY_HAND: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "stages": 1, "microbatch": 8},
    *({"schedule": "1f1b", "stages": 1, "replicas": 2, "microbatch": m} for m in (2, 4)),
    *({"schedule": s, "stages": 2, "microbatch": m} for s in ("1f1b", "zb-h1") for m in (1, 2)),
)


def main() -> None:
    """Run all of them and print a table."""
    import transformers

    steps = options(__doc__, steps=4).steps
    with tempfile.TemporaryDirectory(prefix="raypipe-first-model-") as name:
        folder = Path(name)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(str(folder / "gpt2"))
        environment = {
            **os.environ,
            "RAYPIPE_CACHE_DIR": str(folder / "cache"),
            "NUMBA_CACHE_DIR": str(folder / "kernels"),
        }
        result = []
        for k, parallel in enumerate(("auto", *BY_HAND)):
            job, directory = folder / f"{k}.json", folder / f"run{k}"
            job.write_text(json.dumps({
                "name": "gpt2", "model": {"hf": str(folder / "gpt2"), "sequence": 256},
                "data": {"type": "bytes", "path": "stdlib"},
                "train": {"steps": steps, "batch": 8, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 0},
                "parallel": parallel,
            }))  # fmt: skip
            first_s = first_step_s(job, directory, environment)
            rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            times = [row["step_s"] for row in rows if "step_s" in row]
            result.append(median(times[1:] or times))
            plan = json.loads((directory / "plan.json").read_text())["parallel"]
            shape = ", ".join(f"{key} {plan[key]}" for key in ("schedule", "stages", "replicas", "microbatch"))
            before = f"first step begins after {first_s - times[0]:.1f} s, " if parallel == "auto" else ""
            print(
                f"{'auto' if parallel == 'auto' else 'by hand'}: {shape}: {before}step {result[-1]:.2f} s", flush=True
            )
    print(f"auto over the best by hand: {result[0] / min(result[1:]):.3f}")


if __name__ == "__main__":
    main()
