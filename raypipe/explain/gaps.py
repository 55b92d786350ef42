"""Before every measured task there is a gap: what it waited for is over, and it has not begun. Whose are the gaps?

A task may begin when the task before it on its device has ended and so has everything it depends on. Where the last of
these is on another device, the gap is the message's way here; where it is the global norm, the norm's; else the host's,
which was late to start the task. The host's usual share of a gap is what it takes before tasks that wait for nothing.

With these gaps a replay of the step is exactly the measured one; each can then be taken out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.estimated_ways import estimated
from raypipe.explain.measured import Measured
from raypipe.explain.measured_ways import measured
from raypipe.explain.step_gaps import Gap, StepGaps
from raypipe.explain.waits import Waits
from raypipe.plan.online.recorded_steps import RecordedStep, StepWaits
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.sharding.collectives import Collective

LOOK_S = 1e-4
"""A device that waited for a gather for less than this only looked whether it was there."""


def take_apart(of: Measured, waits: Waits) -> list[StepGaps]:
    """Say of each step what every task did and waited for."""
    graph = waits.graph
    starts = [np.concatenate([t[:, 0] for t in step.times]) for step in of.steps]
    ends = [np.concatenate([t[:, 1] for t in step.times]) for step in of.steps]
    began = [start.copy() for start in starts]
    zero = min(float(s.min()) for s in starts[:1])
    for step, start, end in zip(of.steps, starts, ends, strict=True):
        _move_gathers_out(waits, step, start, end)
    found: list[StepGaps] = []
    gaps: list[Gap] = []
    for k, step in enumerate(of.steps):
        start, end = starts[k], ends[k]
        data = _data(step.waits, graph, end - start)
        none = np.zeros_like(start)
        one = StepGaps(end - start - data, none.copy(), data, none.copy(), none.copy(), {})
        _collective_times(waits, one.work, start, end)
        past = ends[k - 1] if k else None
        for i, task in enumerate(graph.tasks):
            if task.kind not in NETWORK:
                _gap(waits, one, step, k, i, start, end, past, zero, gaps)
            elif past is None and i in waits.carried:
                at_head = i == graph.first[graph.device[i]]
                one.begin[i] = float(start[i]) - zero if at_head else 0.0
        found.append(one)
    if all(step.waits.message_s for step in of.steps):
        measured(waits, found, gaps, [step.waits.message_s for step in of.steps], starts, ends, began)
    else:
        estimated(waits, found, gaps, starts, ends)
    return found


def _move_gathers_out(waits: Waits, step: RecordedStep, start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
    """Let tasks begin when their weights have been gathered, and the gathers end then.

    Devices report such waits as part of the task, and of the gather only when it was launched. All members of a gather
    have it at once, so the first of those that waited says when.
    """
    graph = waits.graph
    ended: dict[Collective, float] = {}
    for d, row in enumerate(step.waits.gather_s):
        for position, seconds in row.items():
            i = graph.first[d] + position
            waited = min(seconds, float(end[i] - start[i]))
            start[i] += waited
            for p in graph.preds[i]:
                if graph.tasks[p].kind == "AG" and waited > LOOK_S:
                    one = waits.collective[p]
                    ended[one] = min(ended.get(one, np.inf), float(start[i]))
    for i, one in waits.collective.items():
        end[i] = max(float(end[i]), ended.get(one, -np.inf))


def _data(waits: StepWaits, graph: TaskGraph, ran: NDArray[np.float64]) -> NDArray[np.float64]:
    """Per task, seconds in it that it waited for samples, never more than it ran.

    A device reads all samples of a step at once, in its first forward.
    """
    data = np.zeros(len(ran))
    for d, (first, last) in enumerate(itertools.pairwise(graph.first)):
        reads = next((i for i in range(first, last) if graph.tasks[i].kind == "F"), None)
        if waits.data_s and reads is not None:
            data[reads] = min(waits.data_s[d], float(ran[reads]))
    return data


def _collective_times(
    waits: Waits, work: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> None:
    """Set the time of each collective: from when all its members were ready to its end on the last of them."""
    members: dict[Collective, list[int]] = defaultdict(list)
    free: dict[int, float] = {}
    ready: dict[int, float] = {}
    for i, one in waits.collective.items():
        members[one].append(i)
        d = waits.graph.device[i]
        ready[i] = max(float(start[i]), free.get(d, -np.inf))
        free[d] = max(float(end[i]), ready[i])
    for own in members.values():
        seconds = max(0.0, max(float(end[i]) for i in own) - max(ready[i] for i in own))
        work[own] = seconds


def _gap(
    waits: Waits,
    one: StepGaps,
    step: RecordedStep,
    k: int,
    i: int,
    start: NDArray[np.float64],
    end: NDArray[np.float64],
    past: NDArray[np.float64] | None,
    zero: float,
    gaps: list[Gap],
) -> None:
    """Find the gap before a compute task or an update, and what it waited for last."""
    graph = waits.graph
    previous = waits.before[i]
    if past is None and previous < 0:
        one.begin[i] = 0.0
    if past is None and (i in waits.norm_after or (previous < 0 and not graph.preds[i])):
        one.begin[i] = float(start[i]) - zero  # what it waited for is not known, so it stays as it was
        return
    ready, message, by_norm = -np.inf, None, False
    if previous >= 0:
        ready = float(end[previous])
    for p in (*graph.preds[i], *(p for p, _ in waits.own.get(i, ()))):
        if float(end[p]) > ready and graph.device[p] == graph.device[i]:
            ready = float(end[p])
    if past is not None:
        ready = max([ready, *(float(past[p]) for p, _ in waits.carried.get(i, ()))])
    for sent, source in ((False, waits.messages[i]), (True, waits.late_messages[i] if past is not None else [])):
        at = past if sent else end
        for p, pair in source:
            if at is not None and float(at[p]) > ready:
                ready, message = float(at[p]), (p, pair, sent)
    for p, _ in waits.norm.get(i, ()):
        if float(end[p]) > ready:
            ready, message = float(end[p]), None
    if past is not None:
        for p, _ in waits.norm_after.get(i, ()):
            if float(past[p]) > ready:
                ready, message, by_norm = float(past[p]), None, True
    seconds = max(0.0, float(start[i]) - ready)
    if graph.tasks[i].kind == "U" and step.waits.sums_s and graph.tasks[previous].kind != "U":
        one.sums[i] = min(seconds, step.waits.sums_s[graph.device[i]])
        seconds -= float(one.sums[i])
    if i in waits.norm or by_norm:
        one.norm[i] = seconds
    else:
        gaps.append(Gap(k, i, ready, seconds, message))
