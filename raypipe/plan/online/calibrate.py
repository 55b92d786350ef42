"""From measured steps to the cost table that predicts the next ones.

The prediction is the schedule simulated with the mean time of each kind of task on each stage, and with the delay of
messages where the receiver was waiting for them; no step time enters it. Means, because a step is a sum of tasks
whose times are skewed: medians came out twice as far below the measured step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

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

    joint, split, weight = per_stage("BW"), per_stage("B"), per_stage("W")
    if schedule.rules.skip_first_b:  # its joint backward is W alone
        joint, weight = (0.0, *joint[1:]), (joint[0] or weight[0], *weight[1:])
    return CostTable(
        forward=per_stage("F"), recompute=per_stage("R"), all_reduce=per_stage("AR"), update=per_stage("U"),
        # A joint backward is one number: the table keeps it as B, since only the sum is ever used.
        input_grad=tuple(j or b for j, b in zip(joint, split, strict=True)), weight_grad=weight,
        comm=_links(timelines),
    )  # fmt: skip


def typical(values: Sequence[float]) -> float:
    """The mean of what is at most ``HICCUP`` times the median.

    >>> typical([1.0, 2.0, 3.0, 90.0])
    2.0
    """
    limit = HICCUP * median(values)
    return fmean(v for v in values if v <= limit)


def _all_reduces(timeline: Timeline) -> dict[int, float]:
    """Per stage, seconds from the moment the last holder had joined its sum and was through with those before it, to
    its end everywhere. Devices issue several at once, and each has only one network."""
    ready: dict[int, float] = {}
    done: dict[int, float] = {}
    for spans in timeline.spans:
        through = float("-inf")
        for task, start, end in spans:
            if task.kind == "AR":
                ready[task.stage] = max(ready.get(task.stage, through), start, through)
                done[task.stage] = max(done.get(task.stage, end), end)
                through = max(through, end)
    return {stage: max(0.0, done[stage] - ready[stage]) for stage in done}


class Delay(NamedTuple):
    """A message between two devices, as seen in a measured step."""

    stages: tuple[int, int]
    """The earlier first, whichever way it went."""
    seconds: float
    """From the end of the task that sent it to the start of the one that took it; at least 0, which clocks of two hosts
    are not good enough to promise."""
    waited: bool
    """The receiver was idle, waiting for it: ``seconds`` is its latency, not only the most that it can be."""


def _links(timelines: Sequence[Timeline]) -> tuple[float, ...]:
    """Latency of every link: the median delay of the messages over it that a device waited for.

    A link over which none was waited for is taken to be as fast as the fastest skip connection that crosses it, else
    as the median of all; but never slower than a message over it was.
    """
    waits: dict[tuple[int, int], list[float]] = defaultdict(list)
    most: dict[tuple[int, int], float] = {}
    for timeline in timelines:
        for ends, delay, waited in message_delays(timeline):
            most[ends] = min(delay, most.get(ends, delay))
            if waited:
                waits[ends].append(delay)
    middle = {ends: median(found) for ends, found in waits.items()}
    every = median(d for found in waits.values() for d in found) if waits else 0.0

    def of(s: int) -> float:
        if (s, s + 1) in middle:
            return middle[s, s + 1]
        guess = min((value for (a, b), value in middle.items() if a <= s < b), default=every)
        return min([guess, *(value for (a, b), value in most.items() if a <= s < b)])

    return tuple(map(of, range(timelines[0].schedule.stages)))


def message_delays(timeline: Timeline) -> list[Delay]:
    """Every message between devices; of several that one task took, the one that was sent last."""
    graph = link(timeline.schedule)
    starts = [s.start for spans in timeline.spans for s in spans]
    ends = [s.end for spans in timeline.spans for s in spans]
    found: list[Delay] = []
    for i, preds in enumerate(graph.preds):
        remote = [p for p in preds if graph.device[p] != graph.device[i]]
        # A schedule may have R wait for the gradient; devices do not, for R does not take it.
        if not remote or graph.tasks[i].kind in ("AR", "U", "R"):
            continue
        last = max(remote, key=lambda p: ends[p])
        own_end = ends[i - 1] if i > graph.first[graph.device[i]] else 0.0
        a, b = sorted((graph.tasks[last].stage, graph.tasks[i].stage))
        found.append(Delay((a, b), max(0.0, starts[i] - ends[last]), ends[last] > own_end))
    return found
