"""The planner's cut beside one that balances stages alone, where a device holds two stages or three.

    python -m tests.bench.accuracy.device_balance            # predicted, a second
    python -m tests.bench.accuracy.device_balance --emulate  # and run with timed waits; wants an idle machine

Twelve uneven models on four A100s, 16 micro-batches. The planner simulates a step with either cut (balanced stages,
balanced devices) and takes the faster one, so no row may be slower. Exit status 1 if one is.
"""

from __future__ import annotations

import sys

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.profile import Profile
from raypipe.job import load_cluster
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.best_first import faster_cut
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.shape import Grid
from tests.bench.command import options
from tests.bench.turns import Turns, take_turns
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


def turns_of(p: Prediction) -> Turns:
    """Return the planned step for emulated devices."""
    chunks = 1 if p.candidate.schedule == "zb-v" else p.candidate.chunks
    shape = Shape(devices=GRID.stages, microbatches=GRID.microbatches, chunks=chunks)
    return Turns(rehearsal(generate(p.candidate.schedule, shape, p.costs), p.costs, Links(), 1))


def main() -> None:
    asked = options(__doc__, emulate=False, steps=3)
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
        most = sorted(rows, key=lambda row: row[3].step_s / row[2].step_s)[:EMULATED]
        turns = [[turns_of(p) for p in pair] for _, _, *pair in most]
        take_turns([one for pair in turns for one in pair], 1, asked.steps)
        print("emulated step")
        for (name, schedule, *_), (even, planned) in zip(most, turns, strict=True):
            gain = even.step_s / planned.step_s - 1
            print(f"{name:<38}{schedule:<18}{even.step_s:>10.3f} s{planned.step_s:>7.3f} s{gain:>7.1%}")
    sys.exit(min(gains) < 1 - 1e-6)


if __name__ == "__main__":
    main()
