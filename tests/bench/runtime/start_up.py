"""How long emulated devices take from the call to the end of their first step, against their number.

    python -m tests.bench.runtime.start_up [8 32 128] [--turns 3]

Pipelines of eight devices, as many copies as it takes; every step is the same 45 ms of waits, or 46 with sums. Ray runs
before, and everything else counts (``emulate``, from its call to its return): making the schedule, reserving, the
actor and its import of torch, the devices' processes, checks, process groups and channels, and the step. The numbers of
devices take turns, and a row is the median turn, because other work on the machine slows down some.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median

import ray

from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.emulation.emulated_run import emulate
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from tests.bench.command import options

DEPTH = 8
TASK_S = 0.001
SIZES = ("8", "32", "128")
"""Multiples of the depth."""


def pipeline() -> Schedule:
    """1F1B on ``DEPTH`` devices."""
    return generate("1f1b", Shape(devices=DEPTH, microbatches=DEPTH))


def first_step(devices: int) -> float:
    """Seconds from the call of ``emulate`` for one step to its return."""
    begun = time.monotonic()
    emulate(pipeline(), CostTable.even(DEPTH, TASK_S, TASK_S, TASK_S), Links(), 1, devices // DEPTH)
    return time.monotonic() - begun


def until_first_step(counts: Sequence[int], turns: int) -> None:
    """Print the table of start-ups."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    connect(DEPTH, emulated=True)
    took: dict[int, list[float]] = {devices: [] for devices in counts}
    for turn in range(turns):
        for devices in counts:
            took[devices].append(first_step(devices))
            print(f"turn {turn + 1}: {devices} devices {took[devices][-1]:.1f} s", flush=True)
    print("devices  start-up s  times that of the first")
    for devices, seconds in took.items():
        print(f"{devices:7d}  {median(seconds):10.1f}  {median(seconds) / median(took[counts[0]]):23.2f}")
    ray.shutdown()


def main() -> None:
    """Command line."""
    asked = options(__doc__, SIZES, turns=3)
    until_first_step(list(map(int, asked.names or SIZES)), asked.turns)


if __name__ == "__main__":
    main()
