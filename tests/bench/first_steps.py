"""Seconds from ``raypipe partition`` to the first step of a run, for families of the zoo.

    python -m tests.bench.first_steps [NAME ...]

Each is a tiny model on two stages (one where it is a single sub-graph). ``raypipe partition`` captures it into an empty
cache directory; then ``raypipe train`` takes the capture from there, and its workers start on a Ray that is up. Both
are whole commands, from their start to their end or to the first row of metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.command import options
from tests.ray_environment import start_ray
from tests.zoo.families import BATCH, FAMILIES, MICROBATCH, Family

NAMES = (
    "gpt2", "llama", "bert", "t5", "vit", "mixtral", "deepseek_v3", "mamba", "convnext", "swin", "wav2vec2", "clip",
    "nn.TransformerEncoder causal", "nn.LSTM dropout", "U-Net",
)  # fmt: skip
"""Families that are measured unless others are named."""
COPIES = 8
"""Times that a family's rows are repeated, so that some can be held out."""


def partition_s(job: Path, environment: dict[str, str]) -> tuple[float, int]:
    """Return the seconds of ``raypipe partition``, and the number of sub-graphs that it has found."""
    began = time.monotonic()
    command = [sys.executable, "-m", "raypipe", "partition", str(job), "--stages", "1", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return seconds, len(json.loads(done.stdout)["subgraphs"])


def first_step_s(job: Path, directory: Path, environment: dict[str, str]) -> float:
    """Return the seconds from the start of ``raypipe train`` to its first row."""
    metrics = directory / "metrics.jsonl"
    command = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(directory), "--json"]
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    seconds = time.monotonic() - began
    _, said = process.communicate()
    if process.returncode:
        raise RuntimeError(said.strip()[-300:])
    return seconds


def job_of(family: Family, rows: Path, stages: int) -> dict[str, Any]:
    """Return the job of a family as the contents of its file."""
    return {
        "name": "first", "model": dict(family.model), "data": {"type": "arrays", "path": str(rows)},
        "train": {"steps": 2, "batch": BATCH, "eval_batches": 1, "seed": 3},
        "parallel": {"schedule": "1f1b", "stages": stages, "microbatch": MICROBATCH},
    }  # fmt: skip


def main() -> int:
    """Measure and print a row per family; the exit status is the number of those that failed."""
    asked = options(__doc__, FAMILIES)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="raypipe-first-") as name:
        folder = Path(name)
        address = start_ray(2, forks=False)  # which sets a token in the environment
        environment = {**os.environ, "RAY_ADDRESS": address}
        print(f"{'family':30} {'partition':>10} {'to first step':>14} {'together':>9}", flush=True)
        for number, family in enumerate(asked.names or [name for name in NAMES if name in FAMILIES]):
            result = FAMILIES[family]
            own = folder / str(number)
            own.mkdir()
            np.savez(own / "rows.npz", **{n: np.concatenate([t.numpy()] * COPIES) for n, t in result.rows().items()})
            job = own / "job.json"  # JSON is YAML
            job.write_text(json.dumps(job_of(result, own / "rows.npz", 1)))
            environment["RAYPIPE_CACHE_DIR"] = str(own / "cache")
            try:
                partition, pieces = partition_s(job, environment)
                job.write_text(json.dumps(job_of(result, own / "rows.npz", min(2, pieces))))
                first = first_step_s(job, own / "run", environment)
            except RuntimeError as error:
                failed += 1
                print(f"{family:30} failed: {error}", flush=True)
                continue
            print(f"{family:30} {partition:8.1f} s {first:12.1f} s {partition + first:7.1f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
