"""The steps that a profile runs: their layers and orders, and the times and memory of each task from their samples.

Every layer is a stage of its own. The real executor runs the measured layers on device 0. The others are on device 1,
which does not exist; its messages are made up (``profiling_worker``). So layers of any kind are measured under the
conditions of training, with the autograd graphs of a few micro-batches in memory and the caches as full.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.profile import LIMIT
from raypipe.models import LayeredModel
from raypipe.plan.online.calibrate import typical
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.kinds import BW, Kind

MICROBATCHES = 4
"""Largest number of micro-batches of a measured step. The first allocates gradients, and the others add to them, as in
training."""
ALIVE = 2
"""Number of micro-batches between forward and backward."""
INSTANCES = 2
"""Number of layers of a kind that are measured; a single one would find its weights in the cache too often."""

Way = Literal["joint", "recompute", "split"]
"""How the backward runs: as BW; as R and BW; or as B and W."""


def alike(model: LayeredModel) -> list[int]:
    """Return, per layer, the first layer of the same kind.

    Layers are of one kind if they have the same name except for digits, and the same FLOPs, parameters, trained
    parameters, inputs and outputs. They take the same time, so one of them is measured for all.
    """
    first: dict[object, int] = {}
    result = []
    for i, name in enumerate(model.names):
        crossed = [model.crossing(k, 1) for k in (i - 1, i) if 0 <= k < model.count - 1]
        values = model.parameters(i), model.trained_parameters(i)
        key = (re.sub(r"\d+", "#", name), model.flops[i], *values, model.reads((i,)), *crossed)
        result.append(first.setdefault(key, i))
    return result


def measured_layers(groups: Sequence[int], long: Collection[int] = ()) -> list[int]:
    """Return the layers to measure: the first ``INSTANCES`` of every kind, the first of the kinds ``long``.

    >>> measured_layers([0, 1, 1, 1, 4]), measured_layers([0, 1, 1, 1, 4], {1})
    ([0, 1, 2, 4], [0, 1, 4])
    """
    seen: dict[int, int] = defaultdict(int)
    result = []
    for i, kind in enumerate(groups):
        seen[kind] += 1
        if seen[kind] <= (1 if kind in long else INSTANCES):
            result.append(i)
    return result


def step_microbatches(size: int, batch: int, most: int = MICROBATCHES) -> int:
    """Return the micro-batches of a measured step: those of the job's step, but between ``ALIVE`` and ``most``.

    >>> step_microbatches(4, 32), step_microbatches(16, 48), step_microbatches(32, 32)
    (4, 3, 2)
    """
    return max(ALIVE, min(most, batch // size))


def measured_step(stages: int, measured: Iterable[int], way: Way, microbatches: int = MICROBATCHES) -> Schedule:
    """Make a step in which device 0 holds the stages ``measured``, and device 1, which need not exist, all others.

    Forwards and backwards alternate, with two micro-batches in flight, as on a middle stage of 1F1B.
    """
    own = frozenset(measured)
    rows: list[list[Task]] = [[], []]

    def put(kind: Kind, order: Iterable[int], mb: int) -> None:
        for stage in order:
            rows[stage not in own].append(Task(kind, stage, (mb,)))

    def backward(mb: int) -> None:
        deep = range(stages - 1, -1, -1)
        if way == "recompute":
            put("R", range(stages), mb)
        if way == "split":
            put("B", deep, mb)
            put("W", deep, mb)
        else:
            put(BW, deep, mb)

    for mb in range(microbatches):
        put("F", range(stages), mb)
        if mb + 1 >= ALIVE:
            backward(mb + 1 - ALIVE)
    for mb in range(microbatches + 1 - ALIVE, microbatches):
        backward(mb)
    rows[0] += [Task("U", stage, ()) for stage in sorted(own)]
    return Schedule(
        name=way,
        placement=(tuple(int(stage not in own) for stage in range(stages)),),
        orders=tuple(map(tuple, rows)),
        microbatches=microbatches,
        graph=StageGraph.chain(stages),
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured steps of one order of tasks on one device."""

    order: tuple[Task, ...]
    times: NDArray[np.float64]
    """``[steps, tasks, 2]``: start and end, in seconds."""
    ran: NDArray[np.float64]
    """``[steps, tasks]``: CPU seconds of the thread in each task; NaN on GPUs, whose tasks no thread runs."""
    memory: NDArray[np.int64]
    """``[tasks, 3]``: bytes in use before each task, at its peak and after it, measured in separate steps; no rows if
    memory was not measured."""


LONGER, LONGER_S = 0.1, 50e-6
"""A thread lost its core if a task took longer than the thread ran by both this share and this many seconds."""


def own_seconds(one: Samples) -> NDArray[np.float64]:
    """Return the undisturbed seconds of each task, ``[steps, tasks]``.

    They are the measured ones, or the thread's CPU seconds where it lost its core. A task of a CPU device computes all
    the time, so the rest went to other processes.
    """
    took = one.times[:, :, 1] - one.times[:, :, 0]
    lost = took > one.ran + np.maximum(LONGER * one.ran, LONGER_S)  # False where ``ran`` is NaN
    return np.where(lost, one.ran, took)


@dataclass(frozen=True, slots=True)
class Taken:
    """Times of one kind of task on one kind of layer, over all micro-batches, steps, instances and devices."""

    seconds: float
    """Mean without outliers (``typical``). It is a mean because sums of times are predicted."""
    median: float
    spread: float
    """Half of the interquartile range, divided by the median."""


def task_times(found: Iterable[Samples], groups: Sequence[int]) -> dict[tuple[Kind, int], Taken]:
    """Return the times by kind of task and kind of layer; ``groups`` is from ``alike``.

    Of a single step, which nothing warmed up, the first micro-batch is left out.
    """
    every: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for one in found:
        lengths = own_seconds(one)
        for k, task in enumerate(one.order):
            if len(one.times) == 1 and task.mbs == (0,):
                continue
            every[task.kind, groups[task.stage]] += lengths[:, k].tolist()
    return {key: _taken(values) for key, values in every.items()}


def _taken(values: Sequence[float]) -> Taken:
    middle = median(values)
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (middle,) * 3
    return Taken(typical(values), middle, (high - low) / 2 / middle if middle else 0.0)


def update_seconds(found: Iterable[Samples]) -> float:
    """Return the seconds from a device's last backward to its last update: gradient norm, clipping, optimizer."""
    spans = []
    for one in found:
        last = max(k for k, task in enumerate(one.order) if task.kind != "U")
        lost = (one.times[:, :, 1] - one.times[:, :, 0] - own_seconds(one))[:, last + 1 :].sum(axis=1)
        spans += (one.times[:, -1, 1] - one.times[:, last, 1] - lost).tolist()
    return typical(spans)


def overhead_seconds(found: Iterable[Samples], own_stages: Iterable[int]) -> float:
    """Return the seconds between two tasks of a device of which the second waits for no message."""
    own = frozenset(own_stages)
    gaps = []
    for one in found:
        for k, (a, b) in enumerate(zip(one.order, one.order[1:], strict=False)):
            waits = b.stage - 1 in own if b.kind == "F" else b.stage + 1 in own or b.kind in ("W", "R")
            if a.kind != "U" and b.kind != "U" and waits:
                gaps += (one.times[:, k + 1, 0] - one.times[:, k, 1]).tolist()
    return typical(gaps) if gaps else 0.0


BEFORE, WORST, AFTER = range(3)
"""Columns of ``Samples.memory``."""


def middle_look(looks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Combine several steps' measurements of memory to ``Samples.memory``, by the median growth in each task.

    Other threads of the process allocate and free too, so a single measurement may be wrong by some kilobytes.
    """
    if not looks:
        return np.zeros((0, 3), dtype=np.int64)
    each = np.stack(looks)
    grown = np.median(each - each[:, :, :1], axis=0)
    return np.asarray(each[0, :, :1] + grown, dtype=np.int64)


def grown_bytes(
    found: Iterable[Samples], kind: Kind, groups: Sequence[int], since: int, until: int
) -> dict[int, float]:
    """Return, by kind of layer, by how many bytes memory grows from ``since`` to ``until`` in tasks of a kind.

    The first micro-batch is left out, because its backward allocates the gradients.
    """
    every: dict[int, list[float]] = defaultdict(list)
    for one in found:
        for k, task in enumerate(one.order):
            if task.kind == kind and task.mbs != (0,):
                every[groups[task.stage]].append(float(one.memory[k, until] - one.memory[k, since]))
    return {layer: median(values) for layer, values in every.items()}


def cast_bytes(found: Sequence[Samples], groups: Sequence[int]) -> dict[int, float]:
    """Return, by kind of layer, the bytes that only the first forward of a step keeps: autocast's casts of weights."""
    first: dict[int, list[float]] = defaultdict(list)
    for one in found:
        for k, task in enumerate(one.order):
            if task.kind == "F" and task.mbs == (0,):
                first[groups[task.stage]].append(float(one.memory[k, AFTER] - one.memory[k, BEFORE]))
    others = grown_bytes(found, "F", groups, BEFORE, AFTER)
    return {layer: max(0.0, median(values) - others[layer]) for layer, values in first.items()}


def fixed_and_each(sizes: Sequence[int], totals: Sequence[float]) -> tuple[float, float]:
    """Fit a constant number of bytes and bytes per sample to the totals; neither is negative.

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


# Detect disturbances of measurements, by the measuring threads' CPU clocks and by measuring twice.
#
# A task of a CPU device computes all the time, so the part of its time in which its thread did not run went to other
# processes. What slows down the thread itself (clock frequency, memory traffic of others, a hypervisor) shows only as a
# difference between two measurements.


def stolen(found: Iterable[Samples]) -> float:
    """Return the largest share, over devices, of the compute tasks' time in which their thread did not run."""
    worst = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took = (one.times[:, compute, 1] - one.times[:, compute, 0]).sum()
        ran = one.ran[:, compute].sum()
        if np.isfinite(ran) and took > 0:
            worst = max(worst, float(1 - ran / took))
    return worst


def charge(found: Iterable[Samples]) -> float:
    """Return the factor by which compute tasks took longer than their threads ran, as expected in training too.

    A machine's daemons, Ray's among them, take some percent of every core when no core is idle. The factor is limited
    to ``LIMIT``, because more is a disturbance, which is warned of and not expected to last.
    """
    took = ran = 0.0
    for one in found:
        compute = [k for k, task in enumerate(one.order) if task.kind != "U"]
        took += float((one.times[:, compute, 1] - one.times[:, compute, 0]).sum())
        ran += float(own_seconds(one)[:, compute].sum())
    return min(took / ran, 1 / (1 - LIMIT)) if ran else 1.0


def drift(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the largest relative difference between the two measurements of each pair.

    >>> drift([(1.0, 1.02), (2.0, 1.6)])
    0.25
    """
    return max((max(a, b) / min(a, b) - 1 for a, b in pairs if min(a, b) > 0), default=0.0)


def to_repeat(stolen_by_size: Mapping[int, float], drifted: float) -> list[int]:
    """Return the micro-batch sizes to measure again: the disturbed ones, or all if the machine's speed changed.

    >>> to_repeat({1: 0.02, 4: 0.3, 8: 0.01}, 0.05), to_repeat({1: 0.02, 4: 0.3}, 0.2), to_repeat({1: 0.02}, 0.0)
    ([4], [1, 4], [])
    """
    if drifted > LIMIT:
        return sorted(stolen_by_size)
    return sorted(size for size, share in stolen_by_size.items() if share > LIMIT)
