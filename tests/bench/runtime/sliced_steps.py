"""Steps in slices of a sequence on emulated devices, against their prediction: schedules in 2 and in 4 slices.

    chrt -r 5 python -m tests.bench.runtime.sliced_steps [--steps 4] [--rounds 2] [--limit 0.03]

Real driver, actors and messages, and timed waits for kernels: F, B and W of 40 ms a micro-batch, of which attention is
10 ms of F and of B, so of k slices the last takes more than the first. Attention falls out evenly over a micro-batch;
whole micro-batches run beside the slices. Prints a row per case, with the medians over the rounds; the exit status is
the number of cases beyond the limit.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from statistics import fmean, median

from raypipe.runtime.emulation.emulated_run import emulate
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from tests.bench.command import options

MS = 1e-3
CASES = [(name, slices) for name in ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b") for slices in (1, 2, 4)]
"""Interleaved: two stages a device, each half as long."""


def step(name: str, slices: int, steps: int) -> tuple[float, float]:
    """Predicted and measured seconds of a step, without the first."""
    chunks = 2 if name == "interleaved-1f1b" else 1
    base = generate(name, Shape(devices=4, microbatches=4, slices=slices, chunks=chunks))
    each = [40 * MS / chunks] * base.stages
    costs = replace(
        CostTable.even(base.stages, each[0], each[0], each[0], comm=0.5 * MS),
        attention=tuple(t / 4 for t in each), attention_grad=tuple(t / 4 for t in each),
    )  # fmt: skip
    found = emulate(base, costs, Links(), steps, 1)
    return fmean(found.predicted_steps_s[1:]), fmean(found.measured_s[1:])


def main() -> int:
    """Run every case; the exit status is the number of those beyond the limit."""
    asked = options(__doc__, steps=4, rounds=2, limit=0.03)
    taken: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(asked.rounds):
        for case in CASES:
            taken[case].append(step(*case, asked.steps))
    beyond = 0
    whole: dict[str, float] = {}
    for (name, slices), found in taken.items():
        predicted, measured = found[0][0], median(m for _, m in found)
        error = measured / predicted - 1
        beyond += abs(error) > asked.limit
        beside = "" if slices == 1 else f"  {whole[name] / measured:.3f} times whole micro-batches"
        if slices == 1:
            whole[name] = measured
        print(f"{name:17} k = {slices}  predicted {predicted / MS:7.1f} ms  measured {measured / MS:7.1f} ms "
              f"({error:+.1%}){beside}", flush=True)  # fmt: skip
    return beyond


if __name__ == "__main__":
    sys.exit(main())
