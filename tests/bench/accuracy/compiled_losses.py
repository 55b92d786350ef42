"""Losses of compiled stages beside eager ones: families of models under several schedules, float64, with dropout.

    python -m tests.bench.accuracy.compiled_losses [NAME ...] [--schedules 1f1b zb-h1 zb-v chimera] [--steps 4]

The eager run is on one device with one stage. Prints, per family and schedule, the largest difference of a training
loss and of a validation loss, and what ran eagerly; the exit status is the number of rows above 1e-9.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from raypipe.job.spec import job_from
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.worker.worker import StageWorker
from tests.actor_pool import actor_pool
from tests.bench.command import options
from tests.bench.runtime.families import TEXT, jobs
from tests.runtime.runs.small_runs import drive

DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "vit": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "llama": {"attention_dropout": 0.1},
    "mixtral": {"attention_dropout": 0.1},
    "t5": {"dropout_rate": 0.1},
}
GPT = {"type": "gpt", "layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 256, "dropout": 0.1,
       "tie_embeddings": True}  # fmt: skip
NAMES = ("gpt", "gpt2", "llama", "bert", "t5", "vit", "mixtral", "resnet", "cnn")
SCHEDULES = ("1f1b", "zb-h1", "zb-v", "chimera")
EXACT = 1e-9


def models(folder: Path, steps: int) -> dict[str, dict[str, Any]]:
    """A job for each family."""
    result = {"gpt": {"name": "gpt", "model": GPT, "data": TEXT}} | jobs(folder, steps)
    for name, changes in DROPOUT.items():
        result[name]["model"]["config"] = {**result[name]["model"]["config"], **changes}
    for job in result.values():
        job["train"] = {"steps": steps, "batch": 8, "eval_batches": 1, "eval_every": max(1, steps // 2), "lr": 0.001,
                        "dtype": "float64", "seed": 3, "clip": 1.0}  # fmt: skip
    return result


def main() -> int:
    """Train each; see above."""
    asked = options(__doc__, NAMES, schedules=SCHEDULES, steps=4)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    wrong = 0
    with (
        actor_pool(StageWorker, "stage actor") as pool,
        tempfile.TemporaryDirectory(prefix="raypipe-compiled-") as name,
    ):
        folder = Path(name)
        every = models(folder, asked.steps)
        for family in asked.names or NAMES:
            job = every[family]
            alone = job_from({**job, "parallel": {"schedule": "1f1b", "stages": 1, "microbatch": 2}})
            eager = drive(alone, pool, folder / f"{family}-eager")
            for schedule in asked.schedules:
                where = folder / f"{family}-{schedule}"
                parallel = {"schedule": schedule, "stages": 2, "microbatch": 2}
                train = {**job["train"], "compile": "inductor", "compile_first": True}
                done = drive(job_from({**job, "train": train, "parallel": parallel}), pool, where)
                off = max(abs(a - b) for a, b in zip(done.losses, eager.losses, strict=True))
                val_off = max(abs(a - b) for a, b in zip(done.val_losses, eager.val_losses, strict=True))
                rows = [row for row in read_rows(where / EVENTS) if row["event"] == "compiled"]
                reasons = {row["reason"] for row in rows if row["reason"]}
                reasons |= {f"validation: {row['eager_validation']}" for row in rows if row["eager_validation"]}
                wrong += max(off, val_off) > EXACT
                print(f"{family:8} {schedule:8} {off:.1e}  validation {val_off:.1e}  {len(rows)} stages, "
                      f"{max(row['seconds'] for row in rows):.0f} s  {'; '.join(reasons)}", flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main())
