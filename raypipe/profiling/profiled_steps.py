"""The steps that a profile is measured with: which layers, in which order, and the times of each task from the spans.

Every layer is a stage of its own. The real executor runs those that are measured on device 0; the others live on a
second device that does not exist, whose messages are made up (``profiling_device``). So layers of any kind are
measured in the surroundings they have in training: autograd graphs of a few micro-batches alive, caches as full.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.models import LayeredModel
from raypipe.plan.online.calibrate import typical
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.kinds import Kind

MICROBATCHES = 4
"""Of a measured step at most: the first one's gradients are new memory, the others' are added to it, as in training."""
ALIVE = 2
"""Micro-batches between forward and backward."""
INSTANCES = 2
"""Alike layers that are measured in a row: a lone one would find its weights in the cache too often."""

Way = Literal["joint", "recompute", "split"]
"""How the backward runs: BW; R and BW; B and W."""


def alike(model: LayeredModel) -> list[int]:
    """Per layer, the first one with the same name but for numbers, the same work, parameters, inputs and outputs.

    Such layers take the same time, so one of them is measured for all.
    """
    first: dict[object, int] = {}
    found = []
    for i, name in enumerate(model.names):
        crossed = [model.crossing(k, 1) for k in (i - 1, i) if 0 <= k < model.count - 1]
        key = (re.sub(r"\d+", "#", name), model.flops[i], model.parameters(i), model.reads((i,)), *crossed)
        found.append(first.setdefault(key, i))
    return found


def measured_layers(groups: Sequence[int]) -> list[int]:
    """The first few of every kind of layer.

    >>> measured_layers([0, 1, 1, 1, 4])
    [0, 1, 2, 4]
    """
    seen: dict[int, int] = defaultdict(int)
    found = []
    for i, kind in enumerate(groups):
        seen[kind] += 1
        if seen[kind] <= INSTANCES:
            found.append(i)
    return found


def step_microbatches(size: int, batch: int) -> int:
    """Micro-batches of a measured step: as many as the job's step has, ``MICROBATCHES`` at most, ``ALIVE`` at least.

    >>> step_microbatches(4, 32), step_microbatches(16, 48), step_microbatches(32, 32)
    (4, 3, 2)
    """
    return max(ALIVE, min(MICROBATCHES, batch // size))


def measured_step(stages: int, here: Iterable[int], way: Way, microbatches: int = MICROBATCHES) -> Schedule:
    """A step in which device 0 holds the stages ``here`` and device 1, which need not exist, all others.

    Two micro-batches are alive at a time, forwards and backwards alternate: 1F1B as a middle stage sees it.
    """
    mine = frozenset(here)
    rows: list[list[Task]] = [[], []]

    def put(kind: Kind, order: Iterable[int], mb: int) -> None:
        for stage in order:
            rows[stage not in mine].append(Task(kind, stage, (mb,)))

    def backward(mb: int) -> None:
        deep = range(stages - 1, -1, -1)
        if way == "recompute":
            put("R", range(stages), mb)
        if way == "split":
            put("B", deep, mb)
            put("W", deep, mb)
        else:
            put("BW", deep, mb)

    for mb in range(microbatches):
        put("F", range(stages), mb)
        if mb + 1 >= ALIVE:
            backward(mb + 1 - ALIVE)
    for mb in range(microbatches + 1 - ALIVE, microbatches):
        backward(mb)
    rows[0] += [Task("U", stage, ()) for stage in sorted(mine)]
    return Schedule(
        name=way,
        placement=(tuple(int(stage not in mine) for stage in range(stages)),),
        orders=tuple(map(tuple, rows)),
        microbatches=microbatches,
        graph=StageGraph.chain(stages),
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """Steps of one order on one device, as measured."""

    order: tuple[Task, ...]
    times: NDArray[np.float64]
    """``[steps, tasks, 2]`` start and end, in seconds."""
    ran: NDArray[np.float64]
    """``[steps, tasks]`` seconds that the thread ran in each task; not a number on GPUs, whose tasks no thread runs."""
    memory: NDArray[np.int64]
    """``[tasks, 3]`` bytes in use before each task, at its worst moment and after it, in steps of their own; no rows
    where nobody looked."""


LONGER, LONGER_S = 0.1, 50e-6
"""A thread lost its core for a moment where a task took longer than it ran by this share, and by this time."""


def own_seconds(one: Samples) -> NDArray[np.float64]:
    """``[steps, tasks]`` seconds of each task by itself: as measured; where its thread lost the core, while it ran.

    A task of a CPU device computes all the time it takes, so what its thread did not run was another process's.
    """
    took = one.times[:, :, 1] - one.times[:, :, 0]
    lost = took > one.ran + np.maximum(LONGER * one.ran, LONGER_S)  # never where no thread's time is known
    return np.where(lost, one.ran, took)


@dataclass(frozen=True, slots=True)
class Taken:
    """Times of one kind of task of one kind of layer, over all micro-batches, steps, instances and devices."""

    seconds: float
    """The mean without hiccups: it is sums that are predicted."""
    median: float
    spread: float
    """Half of the range between the quartiles, over the median."""


def task_times(found: Iterable[Samples], groups: Sequence[int]) -> dict[tuple[Kind, int], Taken]:
    """By kind of task and kind of layer."""
    every: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for one in found:
        lengths = own_seconds(one)
        for k, task in enumerate(one.order):
            every[task.kind, groups[task.stage]] += lengths[:, k].tolist()
    return {key: _taken(values) for key, values in every.items()}


def _taken(values: Sequence[float]) -> Taken:
    middle = median(values)
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
    return Taken(typical(values), middle, (high - low) / 2 / middle if middle else 0.0)


def update_seconds(found: Iterable[Samples]) -> float:
    """From the end of a device's last backward to the end of its last update: gradients' norm, clipping, optimizer."""
    spans = []
    for one in found:
        last = max(k for k, task in enumerate(one.order) if task.kind != "U")
        lost = (one.times[:, :, 1] - one.times[:, :, 0] - own_seconds(one))[:, last + 1 :].sum(axis=1)
        spans += (one.times[:, -1, 1] - one.times[:, last, 1] - lost).tolist()
    return typical(spans)


def overhead_seconds(found: Iterable[Samples], own_stages: Iterable[int]) -> float:
    """Between two tasks of a device where the later one waits for no message."""
    mine = frozenset(own_stages)
    gaps = []
    for one in found:
        for k, (a, b) in enumerate(zip(one.order, one.order[1:], strict=False)):
            waits = b.stage - 1 in mine if b.kind == "F" else b.stage + 1 in mine or b.kind in ("W", "R")
            if a.kind != "U" and b.kind != "U" and waits:
                gaps += (one.times[:, k + 1, 0] - one.times[:, k, 1]).tolist()
    return typical(gaps) if gaps else 0.0


BEFORE, WORST, AFTER = range(3)
"""Columns of ``Samples.memory``."""


def middle_look(looks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """``Samples.memory`` from several steps' worth of it: what each task added, in the middle one of them.

    A process's other threads allocate and free, too, so one look may be wrong by some kilobytes.
    """
    if not looks:
        return np.zeros((0, 3), dtype=np.int64)
    each = np.stack(looks)
    grown = np.median(each - each[:, :, :1], axis=0)
    return np.asarray(each[0, :, :1] + grown, dtype=np.int64)


def grown_bytes(
    found: Iterable[Samples], kind: Kind, groups: Sequence[int], since: int, until: int
) -> dict[int, float]:
    """By kind of layer, how much more memory is in use at ``until`` than at ``since`` in tasks of a kind.

    The first micro-batch is left out: its backward allocates the gradients.
    """
    every: dict[int, list[float]] = defaultdict(list)
    for one in found:
        for k, task in enumerate(one.order):
            if task.kind == kind and task.mbs != (0,):
                every[groups[task.stage]].append(float(one.memory[k, until] - one.memory[k, since]))
    return {layer: median(values) for layer, values in every.items()}


def cast_bytes(found: Sequence[Samples], groups: Sequence[int]) -> dict[int, float]:
    """By kind of layer, how much more the first forward of a step leaves behind than the others: what is made once."""
    first: dict[int, list[float]] = defaultdict(list)
    for one in found:
        for k, task in enumerate(one.order):
            if task.kind == "F" and task.mbs == (0,):
                first[groups[task.stage]].append(float(one.memory[k, AFTER] - one.memory[k, BEFORE]))
    others = grown_bytes(found, "F", groups, BEFORE, AFTER)
    return {layer: max(0.0, median(values) - others[layer]) for layer, values in first.items()}


def fixed_and_each(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, float]:
    """Bytes whatever the micro-batch's size, and of each sample, that explain the totals best; neither is negative.

    >>> fixed_and_each([1, 2, 4], [110.0, 210.0, 410.0])
    (10.0, 100.0)
    >>> fixed_and_each([2], [50.0])
    (0.0, 25.0)
    """
    n, total = np.array(sizes, dtype=float), np.array(totals)
    if len(n) > 1:
        design = np.stack([np.ones_like(n), n], axis=1)
        fixed, each = np.linalg.lstsq(design, total, rcond=None)[0]
        if fixed >= 0 and each >= 0:
            return round(float(fixed), 3), round(float(each), 3)
    return 0.0, max(0.0, float((n * total).sum() / (n * n).sum()))
