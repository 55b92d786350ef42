"""How long messages were under way, where devices did not measure their waits for them (on GPUs)."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import numpy as np
from numpy.typing import NDArray

from raypipe.explain.step_gaps import HICCUP, Gap, StepGaps
from raypipe.explain.waits import Pair, Waits


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
