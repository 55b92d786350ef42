"""``auto`` beside 1F1B, interleaved 1F1B and ZB-H1 through the real runtime: D = 8, uneven stages, emulated devices.

Run: ``python -m tests.bench.auto_emulated``, four minutes; wants a quiet machine. Models of 16 parts, uneven by up to
25 %, two parts a device: as one stage, or as the two stages of an interleaved schedule. ``auto`` gets 1F1B's placement
and memory, and the interleaved schedule's. Updates wait for a global norm, so that a step takes its makespan. Real
driver, actors, programs and messages; kernels are timed waits.

Schedules take turns, so that a slower minute hits all of them. Fails if a measured step is more than 3 % from its
prediction, or if the lead of ``auto`` over another schedule, each turn's two steps held against each other, is more
than one percentage point from the predicted lead.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

from raypipe.runtime.cluster.worker_group import WorkerGroup
from raypipe.runtime.emulation.emulated_run import Links, Rehearsal, rehearsal, run_rehearsal
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import peak_activations
from raypipe.search import search
from tests.bench.emulated import first, worker_group_of

DEPTH, CHUNKS = 8, 2
TIMES_MS, LATENCY_MS, UNEVEN = (10.0, 12.0, 8.0), 1.0, 0.25
STEP, LEAD = 0.03, 0.01
"""Most that a measured step may differ from its prediction, and a measured lead from the predicted one."""


@dataclass(slots=True)
class Entry:
    """One schedule and its turns, in seconds."""

    name: str
    memory: float
    """Activations on the device that holds most, of a stage of 1/8 of the model."""
    what: Rehearsal
    predicted: float = 0.0
    measured: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        """Share by which the median turn is longer than predicted."""
        return median(self.measured) / self.predicted - 1


def model(seed: int, chunks: int, scale: float) -> CostTable:
    """Its 16 parts, dealt to 8 or to 16 stages."""
    rng = random.Random(seed)
    unit = scale * 1e-3
    parts = [[t / CHUNKS * rng.uniform(1, 1 + UNEVEN) * unit for _ in range(DEPTH * CHUNKS)] for t in TIMES_MS]
    joined = CHUNKS // chunks
    times = [tuple(sum(row[s : s + joined]) for s in range(0, len(row), joined)) for row in parts]
    zeros = (0.0,) * (DEPTH * chunks)
    return CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros, update=zeros,
        comm=LATENCY_MS * unit,
    )  # fmt: skip


def entries(count: int, seed: int, scale: float) -> list[Entry]:
    """The schedules of one model, ``auto`` last."""
    found: list[Entry] = []

    def add(name: str, schedule: Schedule, costs: CostTable) -> float:
        held = max(peak_activations(schedule))
        found.append(Entry(name, held * DEPTH / schedule.stages, rehearsal(schedule, costs, Links(), 1, "wait")))
        return held

    line, ring = model(seed, 1, scale), model(seed, CHUNKS, scale)
    whole, halves = Shape(devices=DEPTH, microbatches=count), Shape(devices=DEPTH, microbatches=count, chunks=CHUNKS)
    held = add("1f1b", generate("1f1b", whole, line), line)
    interleaved = add("interleaved-1f1b", generate("interleaved-1f1b", halves, ring), ring)
    add("zb-h1", generate("zb-h1", whole, line), line)
    for name, costs, limit in (("auto, line", line, held), ("auto, ring", ring, interleaved)):
        placement = (tuple(s % DEPTH for s in range(costs.stages)),)
        add(name, search(placement, count, costs, memory_limit=limit).schedule, costs)
    return found


def turn(one: Entry, workers: WorkerGroup, steps: int) -> None:
    """Run a schedule once; the first step, which has nobody to wait for, is left out."""
    seen = run_rehearsal(one.what, first(workers, DEPTH), steps)
    one.predicted = sum(seen.predicted_steps_s[1:]) / (steps - 1)
    one.measured.append(sum(seen.measured_s[1:]) / (steps - 1))


def leads(one: Entry, other: Entry) -> tuple[float, float]:
    """Share by which ``other`` takes longer: predicted, and the median of the turns."""
    measured = median(b / a for a, b in zip(one.measured, other.measured, strict=True)) - 1
    return other.predicted / one.predicted - 1, measured


def show(title: str, found: list[Entry], out: Console) -> bool:
    """Print one model's table; is everything within its limits?"""
    autos = [one for one in found if one.name.startswith("auto")]
    table = Table(title=title, title_justify="left")
    for name in ("schedule", "activations", "predicted ms", "measured ms", "off"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for one in autos:
        table.add_column(f"lead of {one.name}:\npredicted / measured", justify="right")
    good = True
    for one in found:
        times = [f"{1e3 * time:.1f}" for time in (one.predicted, median(one.measured))]
        row = [f"{one.memory:g}", *times, f"{one.error:+.1%}"]
        good = good and abs(one.error) <= STEP
        for auto in autos if one not in autos else ():
            predicted, measured = leads(auto, one)
            row.append(f"{predicted:+.1%} / {measured:+.1%}")
            good = good and abs(measured - predicted) <= LEAD
        table.add_row(one.name, *row)
    out.print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auto_emulated", description=__doc__)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, of which the first is left out")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times; overheads are a smaller share of more")
    args = parser.parse_args()
    out, progress = Console(width=120), Console(stderr=True)
    models = [entries(args.microbatches, seed, args.scale) for seed in range(args.models)]
    with contextlib.redirect_stdout(sys.stderr), worker_group_of(DEPTH) as workers:
        for number in range(args.rounds):
            progress.print(f"round {number + 1} of {args.rounds}", style="dim")
            for found in models:
                # Every second round runs backwards: nobody always follows the same neighbour.
                for one in found if number % 2 == 0 else found[::-1]:
                    turn(one, workers, args.steps)
    good = [show(f"model {seed}", found, out) for seed, found in enumerate(models)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
