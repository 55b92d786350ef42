"""Walk a task graph in an order its devices can really follow: earliest start times, or the deadlock.

The core that the verifier (any durations), the simulator (real ones) and cost-aware generators share.
Compute and updates of a device run one after another in its order. An all-reduce is issued at its place in the
order and then runs on the device's network lane beside later compute; it is a collective, so it starts on all its
holders at once, and collectives of one lane run one after another in the order they were issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.latency import Comm, delays


@dataclass(slots=True)
class Walk:
    """Times of every task, by its number in the graph; those that can never run have ``end < 0``."""

    start: list[float]
    end: list[float]
    order: list[int]
    """Tasks in an order in which every task comes after all it waits for."""
    stuck: list[int]
    """The first task of each lane that cannot run; empty when all ran."""


@no_collection()
def walk(graph: TaskGraph, durations: Sequence[float], comm: Comm = 0.0) -> Walk:
    """Run each task as early as its device's order and its dependencies allow.

    Args:
        graph: the linked schedule.
        durations: time of each task, by number.
        comm: latency of messages, as in a cost table.

    Linear in tasks plus dependencies: a lane that waits sleeps on the one task it waits for.
    """
    tasks, preds, first = graph.tasks, graph.preds, graph.first
    waits = delays(graph.schedule.placement, graph.schedule.graph, comm)
    devices = len(first) - 1
    lanes: list[Sequence[int]] = [range(first[d], first[d + 1]) for d in range(devices)]
    collectives = _Collectives(graph, lanes) if any(t.kind == "AR" for t in tasks) else None
    start, end = [0.0] * len(tasks), [-1.0] * len(tasks)
    order: list[int] = []
    position, free = [0] * len(lanes), [0.0] * len(lanes)
    waiting: dict[int, list[int]] = {}
    awake = list(range(len(lanes)))[::-1]
    while awake:
        lane = awake.pop()
        if lane >= devices and collectives is not None:
            collectives.advance(lane, position, free, start, end, order, durations, waiting, awake)
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
                if ready < 0:
                    waiting.setdefault(p, []).append(lane)
                    break
                if waits is not None:
                    ready += wait[tasks[p][1]]
                if ready > at:
                    at = ready
            else:
                start[i] = at
                end[i] = now = at + durations[i]
                order.append(i)
                k += 1
                if i in waiting:
                    awake.extend(waiting.pop(i))
                continue
            break
        position[lane], free[lane] = k, now
    stuck = [lanes[n][position[n]] for n in range(len(lanes)) if position[n] < len(lanes[n])]
    return Walk(start, end, order, stuck)


class _Collectives:
    """The network lanes: lane ``devices + d`` holds the all-reduces of device ``d``."""

    def __init__(self, graph: TaskGraph, lanes: list[Sequence[int]]) -> None:
        self.tasks, self.preds, self.lanes = graph.tasks, graph.preds, lanes
        devices = len(lanes)
        self.issued_after: dict[int, int] = {}
        """All-reduce -> the compute task before it in its device's order."""
        self.lane_of: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}
        self.arrived: dict[int, dict[int, float]] = {}
        for d in range(devices):
            compute: list[int] = []
            network: list[int] = []
            for i in lanes[d]:
                if graph.tasks[i].kind != "AR":
                    compute.append(i)
                    continue
                network.append(i)
                if compute:
                    self.issued_after[i] = compute[-1]
                self.lane_of[i] = devices + d
                self.members.setdefault(graph.tasks[i].stage, []).append(i)
            lanes[d] = compute
            lanes.append(network)

    def advance(
        self, lane: int, position: list[int], free: list[float], start: list[float], end: list[float],
        order: list[int], durations: Sequence[float], waiting: dict[int, list[int]], awake: list[int],
    ) -> None:  # fmt: skip
        """Let the lane's next all-reduce arrive; when the last holder arrives, all of them run."""
        sequence, k = self.lanes[lane], position[lane]
        if k == len(sequence):
            return
        stage = self.tasks[sequence[k]].stage
        here = self.arrived.setdefault(stage, {})
        # A device that holds the stage twice brings both copies at once: waiting for itself would never end.
        while k < len(sequence) and self.tasks[sequence[k]].stage == stage:
            i = sequence[k]
            needs = [*self.preds[i], *([self.issued_after[i]] if i in self.issued_after else [])]
            late = next((p for p in needs if end[p] < 0), None)
            if late is not None:
                waiting.setdefault(late, []).append(lane)
                return
            here[i] = max((end[p] for p in needs), default=0.0)
            k += 1
        members = self.members[stage]
        if any(i not in here for i in members):
            return
        at = max(max(here[i], free[self.lane_of[i]]) for i in members)
        for i in members:
            start[i], end[i] = at, at + durations[i]
            free[self.lane_of[i]] = max(free[self.lane_of[i]], end[i])
            position[self.lane_of[i]] += 1
            order.append(i)
            awake.extend(waiting.pop(i, ()))
        awake.extend({self.lane_of[i] for i in members})
