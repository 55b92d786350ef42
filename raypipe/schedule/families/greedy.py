"""Order a schedule's tasks by list scheduling: a free device starts the ready task of highest priority.

The families that order by cost (zero-bubble, ZeroPP, out-of-order backprop) are policies of this loop. It works on the
linked task graph, so it has no dependency rule of its own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.schedule.costs import CostTable, delays
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task, backwards
from raypipe.schedule.kinds import BACKWARD, Kind
from raypipe.schedule.shape import Shape
from raypipe.schedule.walk import walk

KINDS: tuple[Kind, Kind, Kind] = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free device chooses its next task."""

    kinds: tuple[Kind, ...] = ("B", "F", "W")
    """Kinds from highest to lowest priority; W is last and fills the time when nothing else is ready."""
    key: Callable[[Task], tuple[int, ...]] = lambda task: (task.mbs[0], task.stage)
    """Priority among ready tasks of one kind; the smallest key runs first."""
    patience: float = 0.0
    """Stay idle rather than start a W if another kind of task arrives within this share of the W's time."""
    limit: float | Sequence[float] = float("inf")
    """A forward may start only while its device holds fewer activations than this; of each device, where a list."""
    ahead: Callable[[int], int] | None = None
    """Stage -> how many forwards it may run ahead of its input gradients; None for no such limit."""


class GreedyOrder(NamedTuple):
    """An ordered schedule and its length."""

    schedule: Schedule
    makespan: float
    span: float
    """The longest time from a device's first start to its last end."""


def timed(graph: TaskGraph, costs: CostTable) -> GreedyOrder:
    """Return the linked schedule as it is, with its length."""
    done = walk(graph, costs.durations(graph.schedule, graph.tasks), costs.comm)
    spans = [max(done.end[a:b]) - done.start[a] for a, b in itertools.pairwise(graph.first) if b > a]
    return GreedyOrder(graph.schedule, max(done.end), max(spans))


def ring(shape: Shape) -> tuple[int, ...]:
    """Return the device of each stage: stage s is on device s mod D."""
    return tuple(s % shape.devices for s in range(shape.devices * shape.chunks))


def whole_step(name: str, placement: tuple[int, ...], count: int, rules: Rules | None = None) -> Schedule:
    """Return a schedule with F, B and W of every stage and id of a chain, whose order is still arbitrary."""
    rules, graph = Rules() if rules is None else rules, StageGraph.chain(len(placement))
    needs = backwards(graph, rules)
    rows: list[list[Task]] = [[] for _ in range(max(placement) + 1)]
    for stage, device in enumerate(placement):
        kinds: tuple[Kind, ...] = KINDS if needs[stage].input_grad else ("F", "W")
        rows[device] += [Task(kind, stage, (m,)) for kind in kinds for m in range(count)]
    return Schedule.of_chain(name, [placement], rows, count, rules)


class Unordered:
    """A step whose tasks several policies order, linked once."""

    def __init__(self, schedule: Schedule, costs: CostTable) -> None:
        """Take tasks of kinds F, B and W and their placement; their order is ignored.

        ``costs`` are the time of each task, and the latency between devices.
        """
        self.schedule = schedule
        self.graph = link(schedule)
        self.durations = costs.durations(schedule, self.graph.tasks)
        self.latency = delays(schedule.placement, schedule.graph, costs.comm)
        self.after: list[list[int]] = [[] for _ in self.graph.tasks]
        """Per task, those that wait for it."""
        for i, before in enumerate(self.graph.preds):
            for p in before:
                self.after[p].append(i)
        self._ranks: dict[Callable[[Task], tuple[int, ...]], list[int]] = {}

    def wait(self, task: int, other: int) -> None:
        """Let a task of the order wait for another one, as if it depended on that."""
        self.graph.preds[task].append(other)
        self.after[other].append(task)

    def ranks(self, key: Callable[[Task], tuple[int, ...]]) -> list[int]:
        """Return each task's place by this key."""
        if key not in self._ranks:
            rank = [0] * len(self.graph.tasks)
            keys = [key(t) for t in self.graph.tasks]
            for place, i in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
                rank[i] = place
            self._ranks[key] = rank
        return self._ranks[key]


def order_greedily(schedule: Schedule, costs: CostTable, policy: Policy) -> GreedyOrder | None:
    """Order the tasks by a policy: ``ordered`` of a step that only one policy orders."""
    return ordered(Unordered(schedule, costs), policy)


def ordered(step: Unordered, policy: Policy, shorter_than: float = float("inf")) -> GreedyOrder | None:
    """Order the tasks by a policy, in time O(n log r) for n tasks of which r are ready at once.

    Args:
        step: the tasks, of the policy's kinds and of one id each, and what they take.
        policy: how a free device chooses.
        shorter_than: an order whose span is not is of no use.

    Returns:
        The ordered schedule; None on a deadlock, as the limits leave every device waiting, or once it is clear that its
        span is no shorter than asked.
    """
    schedule, durations, latency, after = step.schedule, step.durations, step.latency, step.after
    tasks, device = step.graph.tasks, step.graph.device
    needs = [len(p) for p in step.graph.preds]
    rank = step.ranks(policy.key)
    wish = [policy.kinds.index(t.kind) for t in tasks]
    last = len(policy.kinds) - 1

    n = schedule.devices
    limits = [policy.limit] * n if isinstance(policy.limit, int | float) else policy.limit
    coming: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    """Per device, (time, task): the task becomes ready at that time."""
    ready: list[list[list[tuple[int, int]]]] = [[[] for _ in policy.kinds] for _ in range(n)]
    free, begun, live = [0.0] * n, [-1.0] * n, [0] * n
    lead, allowed = [0] * schedule.stages, [len(tasks)] * schedule.stages
    if policy.ahead is not None:
        allowed = [policy.ahead(s) for s in range(schedule.stages)]
    backwards_of = schedule.backwards
    orders: list[list[Task]] = [[] for _ in range(n)]
    arrival = [0.0] * len(tasks)
    for i, open_needs in enumerate(needs):
        if not open_needs:
            coming[device[i]].append((0.0, i))
    for queue in coming:
        heapq.heapify(queue)

    def admitted(i: int) -> bool:
        return live[device[i]] < limits[device[i]] and lead[tasks[i].stage] < allowed[tasks[i].stage]

    def choose(d: int, now: float) -> int:
        """The task to start, or -1 to stay idle."""
        queue = coming[d]
        while queue and queue[0][0] <= now:
            i = heapq.heappop(queue)[1]
            heapq.heappush(ready[d][wish[i]], (rank[i], i))
        for kind, heap in zip(policy.kinds, ready[d], strict=True):
            if not heap:
                continue
            if kind == "F":
                refused = []
                while heap and not admitted(heap[0][1]) and live[d] < limits[d]:  # try a forward of another stage
                    refused.append(heapq.heappop(heap))
                i = heapq.heappop(heap)[1] if heap and live[d] < limits[d] else -1
                for entry in refused:
                    heapq.heappush(heap, entry)
                if i < 0:
                    continue
                return i
            if kind == "W" and policy.patience and queue:
                at, i = queue[0]
                soon = at < now + policy.patience * durations[heap[0][1]]
                if soon and wish[i] < last and (tasks[i].kind != "F" or admitted(i)):
                    return -1
            return heapq.heappop(heap)[1]
        return -1

    # A device's span is its work and what it idles in between; it may idle so much.
    spare = [shorter_than * (1 + 1e-9)] * n
    for i, d in enumerate(device):
        spare[d] -= durations[i]
    left = len(tasks)
    events = [(0.0, d) for d in range(n)]
    while events:
        now, d = heapq.heappop(events)
        if free[d] > now:
            continue
        i = choose(d, now)
        if i < 0:
            if coming[d]:
                heapq.heappush(events, (coming[d][0][0], d))
            continue
        kind, stage, _, replica = task = tasks[i]
        if begun[d] < 0:
            begun[d] = now
        else:
            spare[d] -= now - free[d]
            if spare[d] < 0:
                return None
        end = free[d] = now + durations[i]
        orders[d].append(task)
        left -= 1
        here = backwards_of[stage]
        if kind == "F":
            live[d] += 1
            lead[stage] += 1
        if kind in here.last:
            live[d] -= 1
        if kind != "F" and (kind in BACKWARD or not here.input_grad):
            lead[stage] -= 1
        heapq.heappush(events, (end, d))
        wait = latency[replica][stage] if latency else None
        for j in after[i]:
            at = end + wait[tasks[j][1]] if wait else end
            if at > arrival[j]:
                arrival[j] = at
            needs[j] -= 1
            if not needs[j]:
                heapq.heappush(coming[device[j]], (arrival[j], j))
                if device[j] != d:
                    heapq.heappush(events, (arrival[j], device[j]))
    if left:
        return None
    span = max(f - b for f, b in zip(free, begun, strict=True))
    return GreedyOrder(schedule.with_orders(orders), max(free), span)
