"""From measured steps to the cost table that predicts the next ones.

The prediction is the schedule simulated with the mean time of each kind of task on each stage, and with the delay of
messages where the receiver was waiting for them; no step time enters it. Means, because a step is a sum of tasks
whose times are skewed: medians came out twice as far below the measured step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.simulate.timeline import Timeline

HICCUP = 3.0
"""Times the median from which a task was disturbed by something else on the machine."""


def fit_costs(timelines: Sequence[Timeline]) -> CostTable:
    """Mean task times per stage, in seconds, of measured steps of one schedule; hiccups left out."""
    schedule = timelines[0].schedule
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    size = float(schedule.size)
    for timeline in timelines:
        for spans in timeline.spans:
            for task, start, end in spans:
                if task.kind == "AR":
                    continue
                share = len(task.mbs) * size if task.mbs else 1.0
                times[(task.kind, task.stage)].append((end - start) / share)

        for stage, duration in _all_reduces(timeline).items():
            times[("AR", stage)].append(duration)

    def per_stage(kind: str) -> tuple[float, ...]:
        return tuple(typical(times.get((kind, s), [0.0])) for s in range(schedule.stages))

    joint, split = per_stage("BW"), per_stage("B")
    return CostTable(
        forward=per_stage("F"), recompute=per_stage("R"), all_reduce=per_stage("AR"), update=per_stage("U"),
        # A joint backward is one number: the table keeps it as B, since only the sum is ever used.
        input_grad=tuple(j or b for j, b in zip(joint, split, strict=True)), weight_grad=per_stage("W"),
        comm=median(delays) if (delays := [d for t in timelines for d in message_delays(t)]) else 0.0,
    )  # fmt: skip


def typical(values: Sequence[float]) -> float:
    """The mean of what is at most ``HICCUP`` times the median.

    >>> typical([1.0, 2.0, 3.0, 90.0])
    2.0
    """
    limit = HICCUP * median(values)
    return fmean(v for v in values if v <= limit)


def _all_reduces(timeline: Timeline) -> dict[int, float]:
    """Per stage, seconds from the moment the last holder joined its all-reduce to its end everywhere."""
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for spans in timeline.spans:
        for task, start, end in spans:
            if task.kind == "AR":
                found[task.stage].append((start, end))
    return {stage: max(e for _, e in at) - max(s for s, _ in at) for stage, at in found.items()}


def message_delays(timeline: Timeline) -> list[float]:
    """Seconds from the end of a task to the start of one on another device that was idle, waiting for it."""
    graph = link(timeline.schedule)
    starts = [s.start for spans in timeline.spans for s in spans]
    ends = [s.end for spans in timeline.spans for s in spans]
    found = []
    for i, preds in enumerate(graph.preds):
        remote = [p for p in preds if graph.device[p] != graph.device[i]]
        if not remote or graph.tasks[i].kind in ("AR", "U"):
            continue
        last = max(remote, key=lambda p: ends[p])
        own_end = ends[i - 1] if i > graph.first[graph.device[i]] else 0.0
        if ends[last] > own_end:  # it was this message that the device waited for
            found.append(starts[i] - ends[last])
    return found
