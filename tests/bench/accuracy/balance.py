"""A balanced cut beside one of as many blocks a stage, as predicted and as run.

Run: ``python -m tests.bench.accuracy.balance``.

Emulated: GPT-2 XL on four A100s, 1F1B, through the real driver, actors and messages with timed waits for kernels.
``--train`` also trains a GPT-2 with a large vocabulary on two stages of this machine with either cut, in turns; that
wants two idle cores, and its costs are measured first (``raypipe profile``). Prints one JSON object per line.
"""

from __future__ import annotations

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
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from tests.bench.command import options
from tests.bench.turns import Turns, take_turns

CUTS = ("even", "balanced")
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
    turns = []
    for name in CUTS:
        costs = costs_of(found.profile, getattr(found, name).stages, found.microbatch, found.schedule)
        turns.append(Turns(rehearsal(found.schedule, costs, Links(), 1), name))
    take_turns(turns, rounds, steps)
    _say("emulated", found, {one.name: one.measured_s for one in turns}, {one.name: one.predicted_s for one in turns})


def trained(rounds: int) -> None:
    """Two stages of this machine, both cuts in turns."""
    with tempfile.TemporaryDirectory() as folder:
        job, profile = Path(folder) / "job.yaml", Path(folder) / "profile.json"
        job.write_text(SMALL)
        _raypipe("profile", str(job), "--microbatches", "4", "--devices", "2", "--quick", "-o", str(profile))
        spec = load_job(job)
        found = partition_job(spec, profile)
        took: dict[str, list[float]] = {name: [] for name in CUTS}
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
    asked = options(__doc__, rounds=3, steps=4, train=False)
    emulated(asked.rounds, asked.steps)
    if asked.train:
        trained(asked.rounds)


if __name__ == "__main__":
    main()
