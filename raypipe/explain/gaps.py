"""Before every measured task there is a gap: what it waited for is over, and it has not begun. Whose are the gaps?

A task may begin when the task before it on its device has ended and so has everything it depends on. Where the last of
these is on another device, the gap is the message's way here; where it is the global norm, the norm's; else the host's,
which was late to start the task. The host's usual share of a gap is what it takes before tasks that wait for nothing.

With these gaps a replay of the step is exactly the measured one; each can then be taken out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.measured import Measured
from raypipe.plan.online.recorded_steps import RecordedStep, StepWaits
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.sharding import Collective, collectives
from raypipe.simulate.period import Edges, carried, merge, wait_for_norm
from raypipe.simulate.series import all_reduces_before_updates

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
    result: list[StepGaps] = []
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
        result.append(one)
    if all(step.waits.message_s for step in of.steps):
        measured(waits, result, gaps, [step.waits.message_s for step in of.steps], starts, ends, began)
    else:
        estimated(waits, result, gaps, starts, ends)
    return result


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


# Waits of the tasks of a measured step, before any time is known.


Pair = tuple[int, int]
"""(device that sends, device that receives)."""


@dataclass(slots=True)
class Waits:
    """Waits of the tasks of a step, before any time is known."""

    graph: TaskGraph
    messages: list[list[tuple[int, Pair]]]
    """Per task, (task of another device, the link) whose message it needs."""
    late_messages: list[list[tuple[int, Pair]]]
    """The same of the step before, in schedules without a flush."""
    before: list[int]
    """Per compute task, the one before it on its device; -1 for the first, and for collectives."""
    last: list[int]
    """Per device, its last compute task; -1 for none."""
    own: Edges
    """Further waits for tasks of the same step: of updates for all gradient sums of their device."""
    carried: Edges
    """Waits for tasks of the step before."""
    norm: Edges
    """Waits of updates for the gradients of all devices, which the norm is made of."""
    norm_after: Edges
    """The same of tasks that wait for the norm of the step before."""
    collective: dict[int, Collective]


def waits_of(of: Measured, graph: TaskGraph) -> Waits:
    """Resolve what the tasks of a step wait for.

    Raises:
        ScheduleError: updates are to wait for the norm, and a device has none.
    """
    device, count = graph.device, of.schedule.microbatches
    messages: list[list[tuple[int, Pair]]] = [[] for _ in graph.tasks]
    late: list[list[tuple[int, Pair]]] = [[] for _ in graph.tasks]
    for i, preds in enumerate(graph.preds):
        if graph.tasks[i].mbs:
            messages[i] = [(p, (device[p], device[i])) for p in preds if device[p] != device[i]]
    ran = {(t.kind, t.stage, mb): i for i, t in enumerate(graph.tasks) for mb in t.mbs} if graph.missing else {}
    for i, (kinds, stage, _), mb in graph.missing:
        source = next((ran[k, stage, mb + count] for k in kinds if (k, stage, mb + count) in ran), None)
        if source is not None and device[source] != device[i]:  # else the order of its device says so
            late[i].append((source, (device[source], device[i])))
    before, last = [-1] * len(graph.tasks), [-1] * of.schedule.devices
    for d, (first, end) in enumerate(itertools.pairwise(graph.first)):
        for i in range(first, end):
            if graph.tasks[i].kind not in NETWORK:
                before[i], last[d] = last[d], i
    norm, after = wait_for_norm(graph, of.norm, 0.0)
    return Waits(
        graph,
        messages,
        late,
        before,
        last,
        all_reduces_before_updates(graph),
        carried(graph, graph),
        norm,
        after,
        collectives(graph),
    )


def merged(*edges: Edges) -> Edges:
    """All waits of several tables, in a new one."""
    result: Edges = {}
    for edge in edges:
        merge(result, {i: list(waits) for i, waits in edge.items()})
    return result


# One step taken apart: what every task did, and whose the gap before it was.


HICCUP = 3.0
"""A message that took more than this many times as long as usual on its link found its receiver's host late."""


@dataclass(slots=True)
class StepGaps:
    """One step taken apart; sums of these are the measured starts."""

    work: NDArray[np.float64]
    """Per task, seconds that it ran, without waits inside it; of a collective, its own time on the network."""
    host: NDArray[np.float64]
    data: NDArray[np.float64]
    """Per task, seconds in it that it waited for samples."""
    sums: NDArray[np.float64]
    """Per task, seconds that it could not begin for gradient sums, beyond the collectives of the schedule."""
    norm: NDArray[np.float64]
    """Per task, seconds from the last gradient to its start."""
    begin: dict[int, float]
    """Of the first step: when tasks that wait for the step before could start at the earliest."""
    lags: dict[tuple[int, int], float] = field(default_factory=dict)
    """(task that sends, task that receives) -> seconds of the message's way."""
    late_lags: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same, sent in the step before."""


@dataclass(slots=True)
class Gap:
    """The gap before one task of one step."""

    step: int
    task: int
    ready: float
    """When all that it waited for was over, the way of messages not counted."""
    seconds: float
    waited: tuple[int, Pair, bool] | None
    """The message that was sent last, if that was after its device was free: sender, link, sent in the step before."""


# How long messages were under way, where devices measured how long they waited for them (on CPUs).
#
# The end of a wait is the arrival of a message, and what is left of the gap before the task is the host's. A link
# carries its messages one after another, so a message's own way begins when the one before it has come.


@dataclass(slots=True)
class _Sent:
    """One message."""

    left: float
    """When its sender's task ended."""
    gap: Gap
    """Before its receiver's task."""
    sender: int
    """The task that sent it."""
    pair: Pair
    before: bool
    """It left in the step before its receiver's task."""
    host: float
    """Seconds of the receiver's host before that task."""
    start: float
    """Of that task."""
    looked: float = np.inf
    """When its receiver began to wait for it, if it is the one that came last."""
    came: float = np.inf
    """When it came: measured of that one, estimated of others."""


@dataclass(frozen=True, slots=True)
class _Link:
    """Usual seconds of the messages of one link."""

    alone: float
    """From leaving to arriving where none is before it."""
    middle: float
    """The median of the same, over all."""
    each: float
    """Median from when it has left and the one before has come."""


def measured(
    waits: Waits,
    found: list[StepGaps],
    gaps: list[Gap],
    message_s: Sequence[Sequence[Mapping[int, tuple[float, float]]]],
    starts: list[NDArray[np.float64]],
    ends: list[NDArray[np.float64]],
    began: list[NDArray[np.float64]],
) -> None:
    """Divide the gaps between links and hosts, and estimate the messages that nobody waited for.

    Args:
        waits: what the tasks wait for.
        found: gets the ways of messages, and the seconds of hosts.
        gaps: those before the tasks of all steps.
        message_s: per step and device, position of a task that waited for its messages -> seconds that it did, and
            seconds from then to when it says that it began.
        starts: per step, of all tasks.
        ends: likewise.
        began: per step, when all tasks say that they began; some have waited for gathers since, as ``starts`` say.
    """
    links: dict[Pair, list[_Sent]] = defaultdict(list)
    for gap in gaps:
        device = waits.graph.device[gap.task]
        waited = message_s[gap.step][device].get(gap.task - waits.graph.first[device])
        start, host, came = float(starts[gap.step][gap.task]), gap.seconds, np.inf
        if waited is not None:
            came = min(start, float(began[gap.step][gap.task]) - waited[1])
            host = max(0.0, start - max(gap.ready, came))
        found[gap.step].host[gap.task] = host
        own = [
            _Sent(float(ends[gap.step - before][p]), gap, p, pair, before, host, start)
            for before, sources in ((False, waits.messages[gap.task]), (True, waits.late_messages[gap.task]))
            for p, pair in sources
            if gap.step or not before
        ]
        if own and waited is not None:
            last = max(own, key=lambda one: one.left)
            last.came, last.looked = came, came - waited[0]
        for one in own:
            links[one.pair].append(one)
    for messages in links.values():
        messages.sort(key=lambda one: one.left)
    usual = {pair: link for pair, messages in links.items() if (link := _usual(messages)) is not None}
    for pair, messages in links.items():
        link = usual.get(pair) or usual.get(pair[::-1]) or _Link(0.0, 0.0, 0.0)
        _arrivals(messages, link, found)
    for messages in links.values():
        for one in messages:  # one of another link may have left more of the gap to the host
            step = found[one.gap.step]
            came = min(one.came, one.start - float(step.host[one.gap.task]))
            (step.late_lags if one.before else step.lags)[one.sender, one.gap.task] = max(0.0, came - one.left)


def _usual(messages: Sequence[_Sent]) -> _Link | None:
    """Return what the messages of a link usually take; None where no one was waited for.

    Of a message that had left when its receiver looked for it, most of the wait may be reading it. So those count that
    left later, if there are any.
    """
    ways, free = [], -np.inf
    for one in messages:
        if np.isfinite(one.came):
            ways.append((one.looked <= one.left, one.came - one.left, one.came - max(one.left, free)))
            free = one.came
    clean = [way for way in ways if way[0]] or ways
    if not clean:
        return None
    _, alone, each = zip(*clean, strict=True)
    return _Link(max(0.0, sorted(alone)[len(alone) // 10]), max(0.0, median(alone)), max(0.0, median(each)))


def _arrivals(messages: Sequence[_Sent], link: _Link, found: list[StepGaps]) -> None:
    """Set when each message of a link came, and the seconds of its receiver's host."""
    free = -np.inf
    for one in messages:
        usually, came = max(one.left + link.alone, free + link.each), one.came
        late = came - one.left > HICCUP * link.middle and came - max(one.left, free) > HICCUP * link.each
        if not np.isfinite(came):
            came = min(one.start - one.host, usually)
        elif late or usually < one.looked:
            came = min(came, usually)
            found[one.gap.step].host[one.gap.task] = max(0.0, one.start - max(one.gap.ready, came))
        one.came, free = came, max(free, came)


# How long messages were under way, where devices did not measure their waits for them (on GPUs).


def estimated(
    waits: Waits,
    found: list[StepGaps],
    gaps: list[Gap],
    starts: list[NDArray[np.float64]],
    ends: list[NDArray[np.float64]],
) -> None:
    """Divide the gaps between links and hosts, and estimate the messages that nobody waited for.

    A link's usual time is that of the messages which left after their receiver had become idle. With it, it is known
    which of the others were still on their way when theirs did.
    """
    graph = waits.graph
    ways: dict[Pair, list[float]] = defaultdict(list)
    for gap in gaps:
        if gap.waited is not None:
            ways[gap.waited[1]].append(gap.seconds)
    typical = {pair: median(values) for pair, values in ways.items()}

    def sent(gap: Gap) -> list[tuple[float, int, Pair, bool]]:
        """When each message of a task left, its sender, its link, and whether that was in the step before."""
        own = [(float(ends[gap.step][p]), p, pair, False) for p, pair in waits.messages[gap.task]]
        late = waits.late_messages[gap.task] if gap.step else []
        return own + [(float(ends[gap.step - 1][p]), p, pair, True) for p, pair in late]

    def arrives(message: tuple[float, int, Pair, bool]) -> float:
        return message[0] + typical.get(message[2], 0.0)

    idle: dict[int, list[float]] = defaultdict(list)
    for gap in gaps:
        if gap.waited is None and graph.tasks[gap.task].mbs and all(arrives(m) <= gap.ready for m in sent(gap)):
            idle[graph.device[gap.task]].append(gap.seconds)
    usual = {d: median(values) for d, values in idle.items()}
    typical = {pair: median([max(0.0, v - usual.get(pair[1], 0.0)) for v in values]) for pair, values in ways.items()}
    for gap in gaps:
        one, own = found[gap.step], usual.get(graph.device[gap.task], 0.0)
        messages = sent(gap)
        last = max(messages, key=arrives, default=None)
        start, hosts = float(starts[gap.step][gap.task]), gap.seconds
        if last is not None and (gap.waited is not None or arrives(last) > gap.ready):
            left, p, pair, before = last
            lag = max(0.0, start - own - left)
            if lag > HICCUP * typical.get(pair, 0.0):
                lag = typical.get(pair, 0.0)
            (one.late_lags if before else one.lags)[p, gap.task] = lag
            hosts = start - max(gap.ready, left + lag)
        one.host[gap.task] = max(0.0, hosts)
        for left, p, pair, before in messages:
            lags = one.late_lags if before else one.lags
            if (p, gap.task) not in lags:
                guess = typical.get(pair, typical.get(pair[::-1], 0.0))
                lags[p, gap.task] = min(guess, max(0.0, start - float(one.host[gap.task]) - left))
