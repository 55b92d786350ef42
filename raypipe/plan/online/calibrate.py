"""Fit a cost table to measured steps, to predict later steps.

The prediction simulates the schedule with the mean time of each kind of task on each stage, and with the delay of the
messages that the receiver was waiting for; step times are not used. Means are used because a step is a sum of tasks
whose times are skewed: with medians, predictions were twice as far below the measured step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BW
from raypipe.simulate.timeline import Timeline

HICCUP = 3.0
"""A task that took more than this many times the median was disturbed by something else on the machine."""


def fit_costs(timelines: Sequence[Timeline]) -> CostTable:
    """Return the mean task times per stage, in seconds, over measured steps of one schedule, without outliers."""
    schedule = timelines[0].schedule
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    slices, by_slice = schedule.rules.slices, defaultdict[tuple[str, int], dict[int, list[float]]](dict)
    size = float(schedule.size)
    for timeline in timelines:
        for spans in timeline.spans:
            for task, start, end in spans:
                if task.kind == "AR":
                    continue
                share = len(task.mbs) * size if task.mbs else 1.0
                times[(task.kind, task.stage)].append((end - start) / share)
                if slices > 1 and task.mbs:
                    by_slice[task.kind, task.stage].setdefault(task.mbs[0] % slices, []).append((end - start) / share)

        for stage, duration in _all_reduces(timeline).items():
            times[("AR", stage)].append(duration)

    def per_stage(kind: str) -> tuple[float, ...]:
        return tuple(typical(times.get((kind, s), [0.0])) for s in range(schedule.stages))

    joint, split, weight = per_stage(BW), per_stage("B"), per_stage("W")
    alone = [not backward.input_grad for backward in schedule.backwards]  # a joint backward there is W alone
    weight = tuple(j or w if a else w for j, w, a in zip(joint, weight, alone, strict=True))
    joint = tuple(0.0 if a else j for j, a in zip(joint, alone, strict=True))
    return CostTable(
        forward=per_stage("F"),
        recompute=per_stage("R"),
        all_reduce=per_stage("AR"),
        update=per_stage("U"),
        gather=per_stage("AG"),
        reduce_scatter=per_stage("RS"),
        # A joint backward has one measured time, stored as B's: the simulator uses only the sum of B and W.
        input_grad=tuple(j or b for j, b in zip(joint, split, strict=True)),
        weight_grad=weight,
        attention=_growing(by_slice, ("F",), schedule),
        attention_grad=_growing(by_slice, ("B", BW), schedule),
        comm=_links(timelines),
    )


def _growing(
    by_slice: Mapping[tuple[str, int], Mapping[int, list[float]]], kinds: Sequence[str], schedule: Schedule
) -> tuple[float, ...]:
    """Return, per stage, the part of a kind's time that grows along the slices: the least-squares slope over them.

    A table has the time of slice i as the whole's, plus this part times (2i + 1)/k - 1 (``CostTable.durations``).
    """
    slices, result = schedule.rules.slices, []
    for stage in range(schedule.stages):
        part = 0.0
        for kind in kinds:
            values = {i: typical(some) for i, some in by_slice.get((kind, stage), {}).items()}
            if len(values) == slices > 1 and schedule.backwards[stage].input_grad | (kind == "F"):
                way = {i: (2 * i + 1) / slices - 1 for i in values}
                slope = sum(way[i] * v for i, v in values.items()) / sum(w * w for w in way.values())
                part = max(part, min(slope, fmean(values.values())))
        result.append(max(0.0, part))
    return tuple(result)


def typical(values: Sequence[float]) -> float:
    """Return the mean of the values that are at most ``HICCUP`` times the median.

    >>> typical([1.0, 2.0, 3.0, 90.0])
    2.0
    """
    limit = HICCUP * median(values)
    return fmean(v for v in values if v <= limit)


def _all_reduces(timeline: Timeline) -> dict[int, float]:
    """Per stage, seconds from when every holder was ready for its all-reduce to when it ended on all of them.

    A holder is ready once it has issued the all-reduce and finished the ones before it: devices issue several at once,
    but each has only one network.
    """
    ready: dict[int, float] = {}
    done: dict[int, float] = {}
    for spans in timeline.spans:
        last_end = float("-inf")
        for task, start, end in spans:
            if task.kind == "AR":
                ready[task.stage] = max(ready.get(task.stage, last_end), start, last_end)
                done[task.stage] = max(done.get(task.stage, end), end)
                last_end = max(last_end, end)
    return {stage: max(0.0, done[stage] - ready[stage]) for stage in done}


class Delay(NamedTuple):
    """The measured delay of a message between two devices in one step."""

    stages: tuple[int, int]
    """The two stages, the earlier first whatever the direction."""
    seconds: float
    """Time from the end of the sending task to the start of the receiving one; clamped at 0, because clocks of two
    hosts are not exact."""
    waited: bool
    """Whether the receiver was idle and waited for it: ``seconds`` is then the latency, otherwise an upper bound."""


def _links(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Estimate the latency of every link: the median delay of the messages that a device waited for.

    A link on which no device waited gets the latency of the fastest skip connection across it, else the median over
    all links; but never more than the shortest delay seen on it.
    """
    waits: dict[tuple[int, int], list[float]] = defaultdict(list)
    most: dict[tuple[int, int], float] = {}
    for timeline in timelines:
        for ends, delay, waited in message_delays(timeline):
            most[ends] = min(delay, most.get(ends, delay))
            if waited:
                waits[ends].append(delay)
    middle = {ends: median(result) for ends, result in waits.items()}
    every = median(d for result in waits.values() for d in result) if waits else 0.0

    def of(s: int) -> float:
        if (s, s + 1) in middle:
            return middle[s, s + 1]
        guess = min((value for (a, b), value in middle.items() if a <= s < b), default=every)
        return min([guess, *(value for (a, b), value in most.items() if a <= s < b)])

    return tuple(map(of, range(timelines[0].schedule.stages)))


def message_delays(timeline: Timeline) -> list[Delay]:
    """Return the delay of every message between devices; for a task with several inputs, of the one sent last."""
    graph = link(timeline.schedule)
    starts = [s.start for spans in timeline.spans for s in spans]
    ends = [s.end for spans in timeline.spans for s in spans]
    result: list[Delay] = []
    for i, preds in enumerate(graph.preds):
        remote = [p for p in preds if graph.device[p] != graph.device[i]]
        # A schedule may make R wait for the gradient; devices do not, since R does not use it.
        if not remote or graph.tasks[i].kind in ("AR", "U", "R"):
            continue
        last = max(remote, key=lambda p: ends[p])
        own_end = ends[i - 1] if i > graph.first[graph.device[i]] else 0.0
        a, b = sorted((graph.tasks[last].stage, graph.tasks[i].stage))
        result.append(Delay((a, b), max(0.0, starts[i] - ends[last]), ends[last] > own_end))
    return result
