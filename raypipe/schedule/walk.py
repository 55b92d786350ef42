"""The one clock: when every task of a step starts and ends, or which devices wait for one another in a circle.

Everything that times a schedule is a view of ``walk``:

    one step                            ``simulate.engine``, and ``walk`` itself where only times are asked for
    steps one after another             ``simulate.series``: each step begins with what the step before left behind
    the steady time per step            ``simulate.period``: the state from which every step takes equally long
    the step with its gradient sums     ``passes.sync.gradient_sync_end``: network lanes after the compute is timed

A lane runs its tasks one after another. The compute and the updates of a device are one lane; its collectives (AG, RS,
AR) are another, beside later compute, each issued at its place in the device's order. A collective starts on all
members of its group at once (``sharding.collectives``). The halves of a pair start and end together. A task starts when
its lane is free and all it waits for has arrived; ``latency`` says how long messages take. Where a link carries one
message at a time, the link is a lane as well (``simulate.series``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.schedule.costs import Comm, delays
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.sharding import Collective
from raypipe.schedule.sharding import collectives as collectives_of

Waits = Mapping[int, Sequence[tuple[int, float]]]
"""Task -> (task, time from its end to the earliest start of the one that waits)."""
NEVER = float("-inf")
"""The end of a task that has not run."""


@dataclass(slots=True)
class WalkTimes:
    """Times of every task, by its number in the graph; those that can never run end at ``NEVER``."""

    start: list[float]
    end: list[float]
    stuck: list[int]
    """The first task of each lane that cannot run; empty when all ran."""


@no_collection()
def walk(
    graph: TaskGraph,
    durations: Sequence[float],
    comm: Comm = 0.0,
    also: Waits | None = None,
    begin: Mapping[int, float] | None = None,
) -> WalkTimes:
    """Run each task as early as its lane and its dependencies allow.

    Linear in tasks plus dependencies: a lane that waits sleeps on the one task it waits for.

    Args:
        graph: the linked schedule; a lane per entry of ``first``, and one for the collectives of each.
        durations: time of each task, by number.
        comm: latency of messages, as in a cost table.
        also: what tasks wait for besides the dependency rule.
        begin: earliest starts, by task, that the step before leaves; the first task of every lane has one. Default:
            all lanes are free at 0.
    """
    tasks, preds, first, joined = graph.tasks, graph.preds, graph.first, graph.joined
    waits = delays(graph.schedule.placement, graph.schedule.graph, comm)
    devices = len(first) - 1
    lanes: list[Sequence[int]] = [range(first[d], first[d + 1]) for d in range(devices)]
    start, end = [0.0] * len(tasks), [NEVER] * len(tasks)
    more = None if also is None and begin is None else _More(also or {}, begin or {}, end)
    collectives = _Collectives(graph, lanes, more) if any(t.kind in NETWORK for t in tasks) else None
    position, free = [0] * len(lanes), [0.0 if begin is None else NEVER] * len(lanes)
    waiting: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))[::-1]
    while awake:
        lane = awake.pop()
        if lane >= devices and collectives is not None:
            collectives.advance(lane, position, free, start, end, durations, waiting, awake)
            continue
        sequence, k, now = lanes[lane], position[lane], free[lane]
        while k < len(sequence):
            i = sequence[k]
            at = now
            if waits is not None:
                _, stage, _, replica = tasks[i]
                wait = waits[replica][stage]
            for p in preds[i]:
                ready = end[p]
                if ready == NEVER:
                    waiting.setdefault(p, []).append(lane)
                    break
                if waits is not None:
                    ready += wait[tasks[p][1]]
                if ready > at:
                    at = ready
            else:
                if more is not None and i in more.tasks:
                    late, at = more.earliest(i, at)
                    if late is not None:
                        waiting.setdefault(late, []).append(lane)
                        break
                k += 1
                if joined and i + 1 in joined:  # it starts when the other half can, too
                    now = at
                    continue
                start[i] = at
                end[i] = now = at + durations[i]
                if joined and i in joined:
                    start[i - 1], end[i - 1] = at, now
                    awake.extend(waiting.pop(i - 1, ()))
                if i in waiting:
                    awake.extend(waiting.pop(i))
                continue
            break
        position[lane], free[lane] = k, now
    stuck = [lanes[n][position[n]] for n in range(len(lanes)) if position[n] < len(lanes[n])]
    return WalkTimes(start, end, stuck)


class _More:
    """Waits of few tasks beside their lane and the dependency rule."""

    def __init__(self, also: Waits, begin: Mapping[int, float], end: list[float]) -> None:
        self.also, self.begin, self.end = also, begin, end
        self.tasks = also.keys() | begin.keys()

    def earliest(self, i: int, at: float) -> tuple[int | None, float]:
        """A task that must run before ``i``, if there is one; and when ``i`` can start, if not before ``at``."""
        at = max(at, self.begin.get(i, at))
        for p, lag in self.also.get(i, ()):
            if self.end[p] == NEVER:
                return p, at
            at = max(at, self.end[p] + lag)
        return None, at


def start_together(free: list[float], members: Sequence[tuple[int, float]], duration: float) -> float:
    """Run one collective as early as can be, on all its members at once; return its start.

    Args:
        free: per network lane, when it is free; changed for those that take part.
        members: of each, its lane and when it can take part; a lane may hold several.
        duration: of the collective.
    """
    at = max(max(ready, free[lane]) for lane, ready in members)
    for lane, _ in members:
        free[lane] = at + duration
    return at


class _Collectives:
    """The network lanes of a walk: lane ``devices + d`` holds the collectives of device ``d``."""

    def __init__(self, graph: TaskGraph, lanes: list[Sequence[int]], more: _More | None) -> None:
        self.preds, self.lanes, self.more = graph.preds, lanes, more
        devices = len(lanes)
        self.issued_after: dict[int, int] = {}
        """Collective -> the compute task before it in its device's order."""
        self.lane_of: dict[int, int] = {}
        self.part_of = collectives_of(graph)
        self.members: dict[Collective, list[int]] = {}
        self.arrived: dict[Collective, dict[int, float]] = {}
        for d in range(devices):
            compute: list[int] = []
            network: list[int] = []
            for i in lanes[d]:
                if graph.tasks[i].kind not in NETWORK:
                    compute.append(i)
                    continue
                network.append(i)
                if compute:
                    self.issued_after[i] = compute[-1]
                self.lane_of[i] = devices + d
                self.members.setdefault(self.part_of[i], []).append(i)
            lanes[d] = compute
            lanes.append(network)

    def advance(
        self,
        lane: int,
        position: list[int],
        free: list[float],
        start: list[float],
        end: list[float],
        durations: Sequence[float],
        waiting: dict[int, list[int]],
        awake: list[int],
    ) -> None:
        """Let the lane's next collective arrive; when the last member arrives, all of them run."""
        sequence, k = self.lanes[lane], position[lane]
        if k == len(sequence):
            return
        one = self.part_of[sequence[k]]
        here = self.arrived.setdefault(one, {})
        # A device that holds the stage twice brings both copies at once: waiting for itself would never end.
        while k < len(sequence) and self.part_of[sequence[k]] == one:
            i = sequence[k]
            needs = [*self.preds[i], *([self.issued_after[i]] if i in self.issued_after else [])]
            late, at = next((p for p in needs if end[p] == NEVER), None), max((end[p] for p in needs), default=NEVER)
            if late is None and self.more is not None:
                late, at = self.more.earliest(i, at)
            if late is not None:
                waiting.setdefault(late, []).append(lane)
                return
            here[i] = at
            k += 1
        members = self.members[one]
        if any(i not in here for i in members):
            return
        at = start_together(free, [(self.lane_of[i], here[i]) for i in members], durations[members[0]])
        for i in members:
            start[i], end[i] = at, at + durations[i]
            position[self.lane_of[i]] += 1
            awake.extend(waiting.pop(i, ()))
        awake.extend({self.lane_of[i] for i in members})


def dependency_lags(graph: TaskGraph, comm: Comm) -> Callable[[int], list[tuple[int, float]]]:
    """A function from a task to its dependencies, each with the latency of the message between the two."""
    tasks, preds = graph.tasks, graph.preds
    waits = delays(graph.schedule.placement, graph.schedule.graph, comm)
    if waits is None:
        return lambda i: [(p, 0.0) for p in preds[i]]

    def of(i: int) -> list[tuple[int, float]]:
        _, stage, _, replica = tasks[i]
        wait = waits[replica][stage]
        return [(p, wait[tasks[p][1]]) for p in preds[i]]

    return of
