"""``auto`` beside 1F1B, interleaved 1F1B and ZB-H1 through the real runtime: D = 8, uneven stages, emulated devices.

Models of 16 parts, uneven by up to 25 %, two parts a device: as one stage, or as the two stages of an interleaved
schedule. ``auto`` gets 1F1B's placement and memory, and the interleaved schedule's. Updates wait for a global norm, so
that a step takes its makespan. Real driver, actors, programs and messages; kernels are timed waits.

Schedules take turns, so that a slower minute hits all of them. The lead of ``auto`` over another schedule is that of
each turn's two steps, held against each other.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from raypipe.runtime.emulation.emulated_run import Rehearsal, rehearsal, run_rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import peak_activations
from raypipe.search import search
from tests.bench.accuracy.emulated import first, worker_group_of
from tests.bench.search.line import Effort, Line

DEPTH, CHUNKS = 8, 2
TIMES_MS, LATENCY_MS, UNEVEN = (10.0, 12.0, 8.0), 1.0, 0.25
MICROBATCHES, ROUNDS, STEPS = 16, 3, 6
"""Of a turn's steps the first is left out."""
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


def model(seed: int, chunks: int) -> CostTable:
    """Its 16 parts, dealt to 8 or to 16 stages."""
    rng = random.Random(seed)
    parts = [[t / CHUNKS * rng.uniform(1, 1 + UNEVEN) * 1e-3 for _ in range(DEPTH * CHUNKS)] for t in TIMES_MS]
    joined = CHUNKS // chunks
    times = [tuple(sum(row[s : s + joined]) for s in range(0, len(row), joined)) for row in parts]
    zeros = (0.0,) * (DEPTH * chunks)
    return CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros, update=zeros,
        comm=LATENCY_MS * 1e-3,
    )  # fmt: skip


def entries(seed: int) -> list[Entry]:
    """The schedules of one model, ``auto`` last."""
    found: list[Entry] = []

    def add(name: str, schedule: Schedule, costs: CostTable) -> float:
        held = max(peak_activations(schedule))
        found.append(Entry(name, held * DEPTH / schedule.stages, rehearsal(schedule, costs, Links(), 1, "wait")))
        return held

    line, ring = model(seed, 1), model(seed, CHUNKS)
    whole = Shape(devices=DEPTH, microbatches=MICROBATCHES)
    halves = Shape(devices=DEPTH, microbatches=MICROBATCHES, chunks=CHUNKS)
    held = add("1f1b", generate("1f1b", whole, line), line)
    interleaved = add("interleaved-1f1b", generate("interleaved-1f1b", halves, ring), ring)
    add("zb-h1", generate("zb-h1", whole, line), line)
    for name, costs, limit in (("auto, line", line, held), ("auto, ring", ring, interleaved)):
        placement = (tuple(s % DEPTH for s in range(costs.stages)),)
        add(name, search(placement, MICROBATCHES, costs, memory_limit=limit).schedule, costs)
    return found


def turn(one: Entry, workers: WorkerGroup) -> None:
    """Run a schedule once; the first step, which has nobody to wait for, is left out."""
    seen = run_rehearsal(one.what, first(workers, DEPTH), STEPS)
    one.predicted = sum(seen.predicted_steps_s[1:]) / (STEPS - 1)
    one.measured.append(sum(seen.measured_s[1:]) / (STEPS - 1))


def leads(one: Entry, other: Entry) -> tuple[float, float]:
    """Share by which ``other`` takes longer: predicted, and the median of the turns."""
    measured = median(b / a for a, b in zip(one.measured, other.measured, strict=True)) - 1
    return other.predicted / one.predicted - 1, measured


def emulated(effort: Effort) -> Iterator[Line]:
    """A line for each schedule of each model, and one for each lead of ``auto`` over another."""
    models = {seed: entries(seed) for seed in range(effort.first, effort.first + effort.count)}
    with contextlib.redirect_stdout(sys.stderr), worker_group_of(DEPTH) as workers:
        for number in range(ROUNDS):
            for found in models.values():
                # Every second round runs backwards: nobody always follows the same neighbour.
                for one in found if number % 2 == 0 else found[::-1]:
                    turn(one, workers)
    for seed, found in models.items():
        for one in found:
            times = f"predicted {1e3 * one.predicted:6.1f} ms, measured {1e3 * median(one.measured):6.1f} ms"
            text = f"model {seed} {one.name:17} {one.memory:3g} activations, {times}, off {one.error:+.1%}"
            yield Line(text, abs(one.error), STEP)
        autos = [one for one in found if one.name.startswith("auto")]
        for auto in autos:
            for one in found:
                if one not in autos:
                    predicted, measured = leads(auto, one)
                    text = f"model {seed} lead of {auto.name} over {one.name:17} {predicted:+.1%} / {measured:+.1%}"
                    yield Line(text, abs(measured - predicted), LEAD)
