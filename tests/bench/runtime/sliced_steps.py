"""Steps in slices of a sequence on emulated devices, against their prediction: schedules in 2 and in 4 slices.

    chrt -r 5 python -m tests.bench.runtime.sliced_steps [--steps 4] [--rounds 2] [--limit 0.03]

Real driver, actors and messages, and timed waits for kernels: F, B and W of 40 ms a micro-batch, of which attention is
10 ms of F and of B, so of k slices the last takes more than the first. Attention falls out evenly over a micro-batch;
whole micro-batches run beside the slices. Prints a row per case, with the medians over the rounds; the exit status is
the number of cases beyond the limit.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from tests.bench.command import options
from tests.bench.turns import MS, Turns, take_turns

CASES = [(name, slices) for name in ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b") for slices in (1, 2, 4)]
"""Interleaved: two stages a device, each half as long."""


def turns_of(name: str, slices: int) -> Turns:
    """A schedule in so many slices."""
    chunks = 2 if name == "interleaved-1f1b" else 1
    base = generate(name, Shape(devices=4, microbatches=4, slices=slices, chunks=chunks))
    each = [40 * MS / chunks] * base.stages
    costs = replace(
        CostTable.even(base.stages, each[0], each[0], each[0], comm=0.5 * MS),
        attention=tuple(t / 4 for t in each), attention_grad=tuple(t / 4 for t in each),
    )  # fmt: skip
    return Turns(rehearsal(base, costs, Links(), 1))


def main() -> int:
    """Run every case; the exit status is the number of those beyond the limit."""
    asked = options(__doc__, steps=4, rounds=2, limit=0.03)
    result = {case: turns_of(*case) for case in CASES}
    take_turns(list(result.values()), asked.rounds, asked.steps)
    for (name, slices), one in result.items():
        beside = "" if slices == 1 else f"  {result[name, 1].step_s / one.step_s:.3f} times whole micro-batches"
        print(f"{name:17} k = {slices}  predicted {one.predicted_s / MS:7.1f} ms  measured {one.step_s / MS:7.1f} ms "
              f"({one.error:+.1%}){beside}")  # fmt: skip
    return sum(abs(one.error) > asked.limit for one in result.values())


if __name__ == "__main__":
    sys.exit(main())
