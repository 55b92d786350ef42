"""The planner's cut beside one that balances stages alone, where a device holds two stages or three.

    python -m tests.bench.accuracy.device_balance            # predicted, a second
    python -m tests.bench.accuracy.device_balance --emulate  # and run with timed waits; wants an idle machine

Twelve uneven models on four A100s, 16 micro-batches. The planner simulates a step with either cut (balanced stages,
balanced devices) and takes the faster one, so no row may be slower. Exit status 1 if one is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.profile import Profile
from raypipe.job import load_cluster
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.best_first import faster_cut
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.cost.plain_layer import plain_layer

GRID = Grid(stages=4, replicas=1, microbatch=1, microbatches=16)
SCHEDULES = {"zb-v": 2, "interleaved-1f1b": 2, "bfs": 3, "chimera": 1}
"""Stages a device of one pipeline."""
UNIT = 4e10
"""Operations of a layer of cost 1: 4 ms of forward."""
EMULATED = 4
"""Rows that are run: those that gain most."""
MODELS: dict[str, list[float]] = {
    "GPT, head of 3 layers": [0.05, *[1.0] * 24, 3.0],
    "GPT, head of 5 layers": [0.05, *[1.0] * 18, 5.0],
    "GPT, head of 8 layers": [0.05, *[1.0] * 30, 8.0],
    "encoder-decoder": [0.1, *[1.0] * 12, *[1.7] * 12, 2.5],
    "long encoder, short decoder": [0.1, *[2.2] * 10, *[0.8] * 10, 1.5],
    "vision tower, then text": [0.3, *[0.6] * 16, 0.4, *[1.8] * 12, 2.0],
    "text, then vision head": [0.05, *[1.4] * 11, *[0.5] * 9, 3.5],
    "pyramid of vision stages": [0.2, *[0.5] * 4, *[0.8] * 6, *[1.5] * 10, *[2.4] * 4, 0.3],
    "dense and mixture layers in turn": [0.05, *[1.0, 2.6] * 10, 2.0],
    "attention and MLP apart": [0.05, *[0.4, 0.7] * 13, 3.0],
    "a cross-attention layer every fourth": [0.05, *[1.0, 1.0, 1.0, 2.3] * 5, 2.2],
    "shrinking layers": [2.5 - 0.09 * i for i in range(22)],
}
"""Cost of each layer."""


def profile_of(costs: list[float]) -> Profile:
    """Of a model with such layers, on A100s."""
    works = [
        plain_layer(f"layer {i}", flops=cost * UNIT, parameters=1_000_000, kept_bytes=2**20, output_bytes=2**16)
        for i, cost in enumerate(costs)
    ]
    return analytic_profile(works, load_cluster("cluster/a100.yaml"), "float32", [1])


def both(costs: list[float], schedule: str) -> tuple[Prediction, Prediction]:
    """With balanced stages, and as planned."""
    judge = Predictor(profile_of(costs), TrainSpec(steps=1, batch=GRID.microbatches), len(costs))
    even = judge.time(judge.predict(Candidate.on(GRID, schedule, chunks=SCHEDULES[schedule])), final=True)
    return even, judge.time(faster_cut(judge, even), final=True)


def measured(p: Prediction, steps: int) -> float:
    """Seconds of an emulated step: actors, messages and programs as in training."""
    costs = p.costs
    options = {"--forward": costs.forward, "--input-grad": costs.input_grad, "--weight-grad": costs.weight_grad,
               "--comm": costs.links}  # fmt: skip
    given = [word for key, row in options.items() for word in (key, ",".join(f"{t * 1e3:.4f}" for t in row))]
    shape = ["--devices", str(GRID.stages), "--microbatches", str(GRID.microbatches)]
    if p.candidate.chunks > 1 and p.candidate.schedule != "zb-v":
        shape += ["--chunks", str(p.candidate.chunks)]
    words = ["emulate", p.candidate.schedule, *shape, *given, "--steps", str(steps), "--json"]
    alone = {"RAY_ADDRESS": "local", **os.environ}  # not on a cluster that others may be using
    done = subprocess.run(
        [sys.executable, "-m", "raypipe", *words], capture_output=True, text=True, check=False, env=alone
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])["measured_s"]
    return sum(found) / steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--emulate", action="store_true")
    options.add_argument("--steps", type=int, default=3)
    asked = options.parse_args()
    print(f"{'model':<38}{'schedule':<18}{'stages even':>12}{'planned':>9}{'gain':>7}  cut planned for even")
    rows = [(name, schedule, *both(costs, schedule)) for name, costs in MODELS.items() for schedule in SCHEDULES]
    for name, schedule, even, planned in rows:
        gain = even.step_s / planned.step_s - 1
        print(
            f"{name:<38}{schedule:<18}{even.step_s:>10.3f} s{planned.step_s:>7.3f} s{gain:>7.1%}  "
            f"{planned.candidate.balance}"
        )
    gains = [even.step_s / planned.step_s for _, _, even, planned in rows]
    print(f"{len(rows)} plans: {sum(g > 1 + 1e-6 for g in gains)} faster, {sum(g < 1 - 1e-6 for g in gains)} slower")
    if asked.emulate:
        print("emulated step")
        for name, schedule, *pair in sorted(rows, key=lambda row: row[3].step_s / row[2].step_s)[:EMULATED]:
            even_s, planned_s = (measured(p, asked.steps) for p in pair)
            print(f"{name:<38}{schedule:<18}{even_s:>10.3f} s{planned_s:>7.3f} s{even_s / planned_s - 1:>7.1%}")
    sys.exit(min(gains) < 1 - 1e-6)


if __name__ == "__main__":
    main()
