"""The tasks to order, as flat arrays of numbers.

A *lane* is all tasks of one (kind, stage, replica). Micro-batches of a replica are alike, so some optimal order runs
the tasks of every lane in turn: sorting a lane's starts breaks no dependency and no memory limit. A task is therefore
one integer, ``base[lane] + m`` with m its number in the lane.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable, delays
from raypipe.schedule.deps import dependencies
from raypipe.schedule.ir import Backward, Rules, Schedule, StageGraph, Task, backwards
from raypipe.schedule.kinds import BW, JOINT, Kind

DeviceOrders = list[list[int]]
"""Per device, its tasks in the order they run."""


@dataclass(slots=True)
class Problem:
    """The lanes of one step with their times, dependencies and memory; task ``base[lane] + m`` is a lane's m-th."""

    placement: tuple[tuple[int, ...], ...]
    graph: StageGraph
    microbatches: int
    rules: Rules
    devices: int
    kind: list[Kind] = field(default_factory=list)
    """Per lane, like all fields down to ``frees``."""
    stage: list[int] = field(default_factory=list)
    replica: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    time: list[float] = field(default_factory=list)
    """Time of one task, in the cost table's unit."""
    count: list[int] = field(default_factory=list)
    """Number of tasks: the micro-batches of the lane's replica."""
    base: list[int] = field(default_factory=list)
    """Number of the lane's first task."""
    before: list[list[tuple[int, float]]] = field(default_factory=list)
    """The lanes whose task of the same micro-batch it waits for, each with the latency of the message."""
    after: list[list[tuple[int, float]]] = field(default_factory=list)
    """The lanes that wait for it, each with the latency."""
    takes: list[float] = field(default_factory=list)
    """Activations that a task allocates when it starts."""
    frees: list[float] = field(default_factory=list)
    """Activations that a task frees when it ends."""
    cap: list[float] = field(default_factory=list)
    """Memory limit per device, in activations."""
    lanes_of: list[list[int]] = field(default_factory=list)
    """Per device, its lanes."""
    lane: list[int] = field(default_factory=list)
    """Per task, its lane."""
    sized: bool = False
    """Whether stages' activations differ in size: then the bounds leave memory out, which count activations."""

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.lane)

    def schedule(self, orders: DeviceOrders, name: str = "auto") -> Schedule:
        """Convert orders to a ``Schedule``; micro-batches are assigned to the replicas round robin."""
        replicas = len(self.placement)
        schedule_orders = []
        for order in orders:
            row = []
            for t in order:
                c = self.lane[t]
                mb = (t - self.base[c]) * replicas + self.replica[c]
                row.append(Task(self.kind[c], self.stage[c], (mb,), self.replica[c]))
            schedule_orders.append(tuple(row))
        return Schedule(
            name=name,
            placement=self.placement,
            orders=tuple(schedule_orders),
            microbatches=self.microbatches,
            graph=self.graph,
            rules=self.rules,
        )

    def orders(self, schedule: Schedule) -> DeviceOrders | None:
        """Convert a schedule to orders, with each lane's tasks in turn; None if the schedule has other tasks."""
        number = {key: c for c, key in enumerate(zip(self.kind, self.stage, self.replica, strict=True))}
        seen = [0] * len(self.kind)
        result: DeviceOrders = []
        for tasks in schedule.orders:
            order = []
            for kind, stage, mbs, replica in tasks:
                c = number.get((kind, stage, replica), -1)
                if c < 0 or len(mbs) != 1 or seen[c] == self.count[c]:
                    return None
                order.append(self.base[c] + seen[c])
                seen[c] += 1
            result.append(order)
        return result if seen == self.count and len(result) == self.devices else None

    def fits(self, orders: DeviceOrders) -> bool:
        """Return whether every device stays within its memory limit."""
        return all(peak <= cap + 1e-9 for peak, cap in zip(self.peaks(orders), self.cap, strict=True))

    def peaks(self, orders: DeviceOrders) -> list[float]:
        """Return the most that each device holds at once, in the unit of its memory limit."""
        result = []
        for order in orders:
            live = most = 0.0
            for t in order:
                c = self.lane[t]
                live += self.takes[c]
                most = max(most, live)
                live -= self.frees[c]
            result.append(most)
        return result


def build(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    costs: CostTable,
    *,
    graph: StageGraph | None = None,
    memory_limit: float | Sequence[float] | None = None,
    split: bool = True,
    rules: Rules | None = None,
    recompute: Collection[int] = (),
    freed_by_b: float = 0.0,
    sizes: Sequence[tuple[float, float]] | None = None,
) -> Problem:
    """Build the problem of ordering one step's tasks.

    Args:
        placement: per replica, the device of each stage.
        microbatches: number of micro-batches in a step, over all replicas.
        costs: one value per stage.
        graph: which stage feeds which; by default a chain.
        memory_limit: live activations per device (one number, or one per device); by default no limit.
        split: run B and W as separate tasks; otherwise the joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations after F and recompute them in R.
        freed_by_b: share of an activation that B frees; W frees the remainder.
        sizes: per stage, what an activation takes up to its B, and from there to its W, in any unit, which is then the
            memory limit's too. By default every one takes 1 up to its B, and what ``freed_by_b`` leaves up to its W.

    Raises:
        ScheduleError: the costs have another number of stages, or no order can fit the memory limit.
    """
    places = tuple(tuple(row) for row in placement)
    stages = len(places[0])
    graph = StageGraph.chain(stages) if graph is None else graph
    rules = Rules() if rules is None else rules
    if rules.slices > 1:  # a lane runs its micro-batches in ascending order, a backward its slices in descending order
        raise ScheduleError("slices", "orders are not searched for slices", "leave it out, or name a schedule")
    if costs.stages != stages:
        raise ScheduleError("costs", f"{costs.stages} values for {stages} stages", f"give 1 or {stages} values")
    devices = 1 + max(d for row in places for d in row)
    inputs, outputs, needs = graph.inputs(), graph.outputs(), backwards(graph, rules)
    p = Problem(places, graph, microbatches, rules, devices, lanes_of=[[] for _ in range(devices)])
    number: dict[tuple[Kind, int, int], int] = {}
    for replica, row in enumerate(places):
        count = max(0, -(-(microbatches - replica) // len(places)))
        for s in range(stages):
            kinds = _kinds(needs[s], s in recompute, split)
            no_b = not needs[s].input_grad
            for kind in kinds:
                c = number[kind, s, replica] = len(p.kind)
                p.kind.append(kind)
                p.stage.append(s)
                p.replica.append(replica)
                p.device.append(row[s])
                joint_time = costs.weight_grad[s] if kind in JOINT and no_b else costs.by_kind(kind)[s]
                p.time.append(joint_time)
                p.count.append(count)
                p.base.append(len(p.lane))
                p.lane += [c] * count
                p.lanes_of[row[s]].append(c)
                whole, waiting = (1.0, 1.0 - freed_by_b) if sizes is None else sizes[s]
                if no_b or not split or not needs[s].weight_grad:
                    waiting = whole if needs[s].weight_grad else 0.0
                p.takes.append(whole if kind == ("R" if "R" in kinds else "F") else 0.0)
                only = whole if kinds == ["F"] else 0.0  # nothing is kept without a backward
                p.frees.append({"F": only, "B": whole - waiting, "W": waiting, BW: whole}.get(kind, 0.0))
    latency = delays(places, graph, costs.comm)
    p.before = [[] for _ in p.kind]
    p.after = [[] for _ in p.kind]
    for (kind, s, replica), c in number.items():
        for needed, at, _ in dependencies(kind, s, inputs[s], outputs[s], s in recompute, rules, needs[s]):
            source = next(number[k, at, replica] for k in needed if (k, at, replica) in number)
            lag = latency[replica][s][at] if latency else 0.0
            p.before[c].append((source, lag))
            p.after[source].append((c, lag))
    if memory_limit is None:
        limits = [math.inf] * devices
    elif isinstance(memory_limit, (int, float)):
        limits = [float(memory_limit)] * devices
    else:
        limits = [float(x) for x in memory_limit]
    p.cap, p.sized = limits, sizes is not None
    dropped = {*recompute, *(s for s in range(stages) if not needs[s].exists)}
    _check_memory(p, dropped, [1.0] * stages if sizes is None else [whole for whole, _ in sizes])
    return p


def _kinds(backward: Backward, recomputed: bool, split: bool) -> list[Kind]:
    """The kinds of task of a stage."""
    result: list[Kind] = ["F", "R"] if recomputed and backward.exists else ["F"]
    if not split and backward.weight_grad:
        return [*result, BW]
    if backward.input_grad:
        result.append("B")
    if backward.weight_grad:
        result.append("W")
    return result


def lane_order(p: Problem) -> list[int]:
    """Return all lanes in topological order."""
    waits = [len(b) for b in p.before]
    ready = [c for c, k in enumerate(waits) if not k]
    for c in ready:
        for e, _ in p.after[c]:
            waits[e] -= 1
            if not waits[e]:
                ready.append(e)
    return ready


def _check_memory(p: Problem, dropped: Collection[int], sizes: Sequence[float]) -> None:
    """Refuse a limit too small for one micro-batch.

    When a micro-batch reaches its last stage, a device holds its activations at all its stages but those that have
    ``dropped`` them: they recompute them, or have no backward.
    """
    if len(p.cap) != p.devices:
        raise ScheduleError("memory_limit", f"{len(p.cap)} values for {p.devices} devices", "give one per device")
    for row in p.placement:
        for d in range(p.devices):
            own = [s for s, device in enumerate(row) if device == d]
            need = max([sum(sizes[s] for s in own if s not in dropped), *(sizes[s] for s in own)], default=0.0)
            if p.cap[d] + 1e-9 < need:
                raise ScheduleError(
                    "memory_limit",
                    f"{p.cap[d]:g} activations; one micro-batch on device {d} needs {need:g}",
                    f"use a number >= {need:g}",
                )
