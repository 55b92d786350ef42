"""A balanced cut beside one of as many blocks a stage, as predicted and as run.

Run: ``python -m tests.bench.accuracy.balance``.

Emulated: GPT-2 XL on four A100s, 1F1B, through the real driver, actors and messages with timed waits for kernels.
``--train`` also trains a GPT-2 with a large vocabulary on two stages of this machine with either cut, in turns; that
wants two idle cores, and its costs are measured first (``raypipe profile``). Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from raypipe.cost.stages import costs_of
from raypipe.job import load_job
from raypipe.partition.partition_job import partition_job
from raypipe.partition.report import Partition
from raypipe.plan.plan import Plan

SMALL = """
name: balance
model:
  hf: gpt2
  config: {n_layer: 8, n_embd: 128, n_head: 4, vocab_size: 16384, embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0}
  sequence: 64
data: {type: bytes, path: stdlib}
train: {steps: 20, batch: 32, seed: 0}
parallel: {schedule: 1f1b, stages: 2, microbatch: 4}
"""


def emulated(rounds: int, steps: int) -> None:
    """Four emulated A100s, both cuts in turns."""
    found = partition_job(load_job("jobs/gpt2-xl.yaml"), cluster=Path("cluster/devices/a100.yaml"))
    took: dict[str, list[float]] = {"even": [], "balanced": []}
    predicted: dict[str, float] = {}
    for _ in range(rounds):
        for name in took:
            costs = costs_of(found.profile, getattr(found, name).stages, found.microbatch, found.schedule)
            options = {"--forward": costs.forward, "--input-grad": costs.input_grad, "--weight-grad": costs.weight_grad,
                       "--comm": costs.links}  # fmt: skip
            given = [word for key, row in options.items() for word in (key, ",".join(f"{t * 1e3:.4f}" for t in row))]
            shape = ["--devices", "4", "--microbatches", str(found.schedule.microbatches), "--steps", str(steps)]
            run = json.loads(_raypipe("emulate", "1f1b", *shape, *given, "--json").splitlines()[-1])
            took[name].append(sum(run["measured_s"]) / steps)
            predicted[name] = sum(run["predicted_steps_s"]) / steps
    _say("emulated", found, took, predicted)


def trained(rounds: int) -> None:
    """Two stages of this machine, both cuts in turns."""
    with tempfile.TemporaryDirectory() as folder:
        job, profile = Path(folder) / "job.yaml", Path(folder) / "profile.json"
        job.write_text(SMALL)
        _raypipe("profile", str(job), "--microbatches", "4", "--devices", "2", "--quick", "-o", str(profile))
        spec = load_job(job)
        found = partition_job(spec, profile)
        took: dict[str, list[float]] = {"even": [], "balanced": []}
        for turn in range(rounds):
            for name in took:
                cut = getattr(found, name)
                plan = Path(folder) / f"{name}.json"
                Plan.of(spec.parallel, cut.stages, spec.train.batch).save(plan)
                run_dir = Path(folder) / f"{name}-{turn}"
                out = _raypipe("train", str(job), "--plan", str(plan), "--run-dir", str(run_dir), "--json")
                took[name].append(json.loads(out.splitlines()[-1])["step_s_median"])
        _say("trained", found, took, {name: found.step_s(getattr(found, name)) for name in took})


def _raypipe(*words: str) -> str:
    alone = {"RAY_ADDRESS": "local", **os.environ}  # not on a cluster that others may be using
    command = [sys.executable, "-m", "raypipe", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def _say(how: str, found: Partition, took: dict[str, list[float]], predicted: dict[str, float]) -> None:
    rows = {name: statistics.median(times) for name, times in took.items()}
    for name, seconds in rows.items():
        cut = getattr(found, name)
        sizes = "/".join(str(len(part)) for part in cut.stages)
        said = {"run": how, "cut": name, "subgraphs": sizes, "predicted_s": predicted[name], "measured_s": seconds}
        print(json.dumps(said))
    speedups = {"predicted": predicted["even"] / predicted["balanced"], "measured": rows["even"] / rows["balanced"]}
    print(json.dumps({"run": how, "speedup": speedups}), flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--train", action="store_true")
    asked = options.parse_args()
    emulated(asked.rounds, asked.steps)
    if asked.train:
        trained(asked.rounds)


if __name__ == "__main__":
    main()
