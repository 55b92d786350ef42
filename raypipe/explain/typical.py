"""Times that tasks would have taken on an undisturbed device: the line between a straggler and a bad cut.

A stage that is too large is slow always and wherever it runs; a disturbed device is slower than something it should
equal. Four things tell the two apart:

- the task's own usual time in the measured steps: single tasks that took longer were disturbed, unless their
  micro-batch took longer on every device;
- other holders of the same stage (data-parallel copies);
- the same tasks in the run's first steps;
- what the profile expects of the stage, relative to the other stages.

By each of the last three a device is as many times too slow as all its tasks together are; the largest counts, from
``STRAGGLES`` on. What none of them shows is the cut's fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.measured import Measured, TaskTimes
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import COMPUTE, Kind

STRAGGLES = 1.1
"""A device is a straggler if its tasks take this many times as long as they should: profiles are no more exact."""
Key = tuple[int, Kind, int]
"""(device, kind, stage)."""


def share(task: Task) -> int:
    """Return by what a task's time is divided to compare it with others: its micro-batches."""
    return max(1, len(task.mbs))


def undisturbed(of: Measured, graph: TaskGraph, work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time that each compute task and update would have taken on an undisturbed device.

    Args:
        of: the steps, for what their tasks should take.
        graph: the linked schedule.
        work: ``[steps, tasks]``: seconds that each task computed.

    Returns:
        ``[steps, tasks]``; other kinds of task keep their time.
    """
    keys = [(graph.device[i], t.kind, t.stage) for i, t in enumerate(graph.tasks)]
    each: dict[Key, list[float]] = defaultdict(list)
    for i, (task, key) in enumerate(zip(graph.tasks, keys, strict=True)):
        if _compares(task.kind):
            each[key] += (work[:, i] / share(task)).tolist()
    usual = {key: median(values) for key, values in each.items()}
    slow = slowdowns(usual, of.planned, of.earlier, graph.schedule.devices)
    found = work.copy()
    longer = _longer_microbatches(graph, keys, usual, work)
    for i, (task, key) in enumerate(zip(graph.tasks, keys, strict=True)):
        if not _compares(task.kind):
            continue
        expected = usual[key] * share(task) / slow[key[0]]
        for step in range(len(work)):
            expected_here = expected * longer.get((step, task.kind, task.mbs), 1.0)
            found[step, i] = min(work[step, i], expected_here)  # faster than usual is no fault
    return found


def _compares(kind: Kind) -> bool:
    return kind in COMPUTE or kind == "U"


def slowdowns(usual: dict[Key, float], planned: TaskTimes, earlier: TaskTimes, devices: int) -> list[float]:
    """Return per device how many times as long as they should its tasks take; 1 for one that is as fast as it should.

    ``usual`` is the measured time of each of its tasks.
    """
    holders: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for (_, kind, stage), seconds in usual.items():
        holders[kind, stage].append(seconds)
    twins = {key: _low_median(values) for key, values in holders.items() if len(values) > 1}
    by_twins = _ratios(usual, twins, devices)
    by_itself = _ratios(usual, earlier, devices)
    by_plan = _ratios({key: t for key, t in usual.items() if key[1] in COMPUTE}, planned, devices)
    known = [ratio for ratio in by_plan if ratio is not None]
    scale = _low_median(known) if known else 1.0
    found = []
    for twin, own, plan in zip(by_twins, by_itself, by_plan, strict=True):
        most = max(twin or 1.0, own or 1.0, plan / scale if plan is not None and scale > 0 else 1.0)
        found.append(most if most >= STRAGGLES else 1.0)
    return found


def _ratios(usual: dict[Key, float], expected: TaskTimes, devices: int) -> list[float | None]:
    """Per device, its usual times over the expected ones; None where nothing is expected."""
    sums = [[0.0, 0.0] for _ in range(devices)]
    for (device, kind, stage), seconds in usual.items():
        if expected.get((kind, stage), 0.0) > 0.0:
            sums[device][0] += seconds
            sums[device][1] += expected[kind, stage]
    return [a / b if b > 0 else None for a, b in sums]


def _low_median(values: Iterable[float]) -> float:
    """The median; of an even number of values, the lower of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _longer_microbatches(
    graph: TaskGraph, keys: list[Key], usual: dict[Key, float], work: NDArray[np.float64]
) -> dict[tuple[int, Kind, tuple[int, ...]], float]:
    """(step, kind, micro-batches) -> how many times as long as usual all devices took for these; 1 is left out.

    Of the devices' ratios the one nearest to 1 counts, so that no single device's disturbance looks like longer data.
    """
    on: dict[tuple[Kind, tuple[int, ...]], list[int]] = defaultdict(list)
    for i, task in enumerate(graph.tasks):
        if task.mbs and usual.get(keys[i], 0.0) > 0.0:
            on[task.kind, task.mbs].append(i)
    found = {}
    for (kind, mbs), own in on.items():
        if len({keys[i][0] for i in own}) < 2:
            continue
        typical = np.array([usual[keys[i]] * share(graph.tasks[i]) for i in own])
        ratios = work[:, own] / typical
        for step, row in enumerate(ratios):
            nearest = float(row[np.argmin(np.abs(row - 1.0))])
            if nearest != 1.0 and ((row > 1).all() or (row < 1).all()):
                found[step, kind, mbs] = nearest
    return found
