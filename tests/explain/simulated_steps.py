"""Steps that are made by hand: simulated with what is wrong in them, and reported as devices would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from raypipe.plan.online.recorded_steps import NO_WAITS, RecordedStep, StepWaits
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.walk import walk
from raypipe.simulate.period import merge, wait_for_norm
from raypipe.simulate.series import all_reduces_before_updates


def whole_step(name: str = "1f1b", devices: int = 4, microbatches: int = 8, replicas: int = 1, **options) -> Schedule:
    """The schedule of a step over all devices, with its gradient sums and updates."""
    schedule = replicate(generate(name, Shape(devices=devices, microbatches=microbatches, **options)), replicas)
    return add_updates(place_gradient_sync(schedule, "lazy"))


def run_steps(
    schedule: Schedule, costs: CostTable, steps: int = 3, gap: float = 0.0,
    slower: Callable[[int, int], float] = lambda step, task: 1.0, waits: StepWaits = NO_WAITS,
    norm: NormPolicy = "none",
) -> tuple[RecordedStep, ...]:  # fmt: skip
    """Time steps that follow one another with a barrier and ``gap`` between them; ``slower`` is by (step, task)."""
    graph = link(schedule)
    also = all_reduces_before_updates(graph)
    merge(also, wait_for_norm(graph, norm, 0.0)[0])
    durations = costs.durations(schedule, graph.tasks)
    begin, result = 0.0, []
    for step in range(steps):
        done = walk(
            graph,
            [d if graph.tasks[i].kind in NETWORK else d * slower(step, i) for i, d in enumerate(durations)],
            costs.comm,
            also,
        )
        times = np.array([done.start, done.end]).T + begin
        rows = [times[a:b] for a, b in zip(graph.first, graph.first[1:], strict=False)][: schedule.devices]
        result.append(RecordedStep(step + 1, tuple(rows), waits))
        begin = float(times.max()) + gap
    return tuple(result)


def message_waits(
    schedule: Schedule, step: RecordedStep, late: Callable[[int], float] = lambda task: 0.0
) -> tuple[dict[int, tuple[float, float]], ...]:  # fmt: skip
    """What devices measure as waits for messages, whose hosts start tasks so ``late`` after their messages."""
    graph, start = link(schedule), np.concatenate([t[:, 0] for t in step.times])
    result: list[dict[int, tuple[float, float]]] = []
    for d, (first, times) in enumerate(zip(graph.first, step.times, strict=False)):
        free, waits = float(min(t[:, 0].min() for t in step.times)), {}
        for position, task in enumerate(schedule.orders[d]):
            own = max([free, *(float(times[p - first, 1]) for p in graph.preds[first + position]
                               if graph.device[p] == d)])  # fmt: skip
            after = late(first + position)
            waited = float(start[first + position]) - own - after
            if waited > 0 and any(graph.device[p] != d for p in graph.preds[first + position]):
                waits[position] = waited, after
            if task.kind not in NETWORK:
                free = float(times[position, 1])
        result.append(waits)
    return tuple(result)


def uneven(forward: Sequence[float]) -> CostTable:
    """Costs whose backward takes twice the forward."""
    return replace(
        CostTable.even(len(forward)), forward=tuple(forward), input_grad=tuple(forward), weight_grad=tuple(forward)
    )
