"""How long messages were under way, where devices measured how long they waited for them (on CPUs).

The end of a wait is the arrival of a message, and what is left of the gap before the task is the host's. A link carries
its messages one after another, so a message's own way begins when the one before it has come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.step_gaps import HICCUP, Gap, StepGaps
from raypipe.explain.waits import Pair, Waits


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
