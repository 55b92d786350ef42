"""``auto`` beside 1F1B, interleaved 1F1B and ZB-H1 in turns on emulated devices: D = 8, uneven stages.

Models of 16 parts, uneven by up to 25 %, two parts a device: as one stage, or as the two stages of an interleaved
schedule. ``auto`` gets 1F1B's placement and memory, and the interleaved schedule's. Updates wait for a global norm, so
that a step takes its makespan. The lead of ``auto`` over another schedule is that of each turn's two steps, one held
against the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import peak_activations
from raypipe.search import search
from tests.bench.search.line import Effort, Line
from tests.bench.turns import Turns, lead, take_turns

DEPTH, CHUNKS = 8, 2
TIMES_MS, LATENCY_MS, UNEVEN = (10.0, 12.0, 8.0), 1.0, 0.25
MICROBATCHES, ROUNDS, STEPS = 16, 3, 6
"""Of a turn's steps the first is left out."""
STEP, LEAD = 0.03, 0.01
"""Most that a measured step may differ from its prediction, and a measured lead from the predicted one."""


def model(seed: int, chunks: int) -> CostTable:
    """Its 16 parts, dealt to 8 or to 16 stages."""
    rng = random.Random(seed)
    parts = [[t / CHUNKS * rng.uniform(1, 1 + UNEVEN) * 1e-3 for _ in range(DEPTH * CHUNKS)] for t in TIMES_MS]
    joined = CHUNKS // chunks
    times = [tuple(sum(row[s : s + joined]) for s in range(0, len(row), joined)) for row in parts]
    return CostTable(forward=times[0], input_grad=times[1], weight_grad=times[2], comm=LATENCY_MS * 1e-3)


def entries(seed: int) -> list[tuple[float, Turns]]:
    """The schedules of one model, ``auto`` last; with each the activations, of a stage of 1/8 of the model, on the
    device that holds most."""
    result: list[tuple[float, Turns]] = []

    def add(name: str, schedule: Schedule, costs: CostTable) -> float:
        held = max(peak_activations(schedule))
        result.append((held * DEPTH / schedule.stages, Turns(rehearsal(schedule, costs, Links(), 1, "wait"), name)))
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
    return result


def emulated(effort: Effort) -> Iterator[Line]:
    """A line for each schedule of each model, and one for each lead of ``auto`` over another."""
    models = {seed: entries(seed) for seed in range(effort.first, effort.first + effort.count)}
    take_turns([one for result in models.values() for _, one in result], ROUNDS, STEPS)
    for seed, result in models.items():
        for memory, one in result:
            times = f"predicted {1e3 * one.predicted_s:6.1f} ms, measured {1e3 * one.step_s:6.1f} ms"
            text = f"model {seed} {one.name:17} {memory:3g} activations, {times}, off {one.error:+.1%}"
            yield Line(text, abs(one.error), STEP)
        named = [one for _, one in result if not one.name.startswith("auto")]
        for auto in (one for _, one in result if one not in named):
            for one in named:
                predicted, measured = lead(auto, one)
                text = f"model {seed} lead of {auto.name} over {one.name:17} {predicted - 1:+.1%} / {measured - 1:+.1%}"
                yield Line(text, abs(measured - predicted), LEAD)
