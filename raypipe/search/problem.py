"""What is to be ordered, as flat integer arrays.

Micro-batches of one replica are alike, so some best order takes them in turn at every (kind, stage, replica): sorting
the starts of such a *lane* breaks no dependency and no memory limit. A device's order is therefore a word over its
lanes, and a task is (lane, how many of that lane came before), one integer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import dependencies
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task
from raypipe.schedule.kinds import JOINT, Kind
from raypipe.schedule.latency import delays

Words = list[list[int]]
"""Per device, its tasks in order."""


@dataclass(slots=True)
class Problem:
    """Lanes with their times, edges and memory; task ``base[lane] + m`` is the lane's m-th."""

    placement: tuple[tuple[int, ...], ...]
    graph: StageGraph
    microbatches: int
    rules: Rules
    devices: int
    kind: list[Kind]
    """Per lane."""
    stage: list[int]
    replica: list[int]
    device: list[int]
    time: list[float]
    count: list[int]
    """Micro-batches of the lane's replica."""
    base: list[int]
    before: list[list[tuple[int, float]]]
    """Per lane, the lanes whose task of the same micro-batch it needs, and the latency from there."""
    after: list[list[tuple[int, float]]]
    takes: list[float]
    """Activations that start to live when a task of the lane starts."""
    frees: list[float]
    """Activations that die when it ends."""
    cap: list[float]
    """Per device, activations it may hold."""
    lanes_of: list[list[int]]
    """Per device."""
    lane: list[int]
    """Of each task."""

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return len(self.lane)

    def schedule(self, words: Words, name: str = "auto") -> Schedule:
        """The ordinary schedule that the words stand for; micro-batches go to the replicas in turn."""
        replicas = len(self.placement)
        orders = []
        for word in words:
            row = []
            for t in word:
                c = self.lane[t]
                mb = (t - self.base[c]) * replicas + self.replica[c]
                row.append(Task(self.kind[c], self.stage[c], (mb,), self.replica[c]))
            orders.append(tuple(row))
        return Schedule(
            name=name, placement=self.placement, orders=tuple(orders), microbatches=self.microbatches,
            graph=self.graph, rules=self.rules,
        )  # fmt: skip

    def words(self, schedule: Schedule) -> Words | None:
        """The words of a schedule of the same tasks, each lane put in turn; None if its tasks are others."""
        number = {key: c for c, key in enumerate(zip(self.kind, self.stage, self.replica, strict=True))}
        seen = [0] * len(self.kind)
        found: Words = []
        for order in schedule.orders:
            word = []
            for kind, stage, mbs, replica in order:
                c = number.get((kind, stage, replica), -1)
                if c < 0 or len(mbs) != 1 or seen[c] == self.count[c]:
                    return None
                word.append(self.base[c] + seen[c])
                seen[c] += 1
            found.append(word)
        return found if seen == self.count and len(found) == self.devices else None

    def fits(self, words: Words) -> bool:
        """Does every device stay within its memory?"""
        for d, word in enumerate(words):
            live, cap = 0.0, self.cap[d] + 1e-9
            for t in word:
                c = self.lane[t]
                live += self.takes[c]
                if live > cap:
                    return False
                live -= self.frees[c]
        return True


def build(
    placement: Sequence[Sequence[int]], microbatches: int, costs: CostTable, *,
    graph: StageGraph | None = None, memory_limit: float | Sequence[float] | None = None, split: bool = True,
    rules: Rules | None = None, recompute: Collection[int] = (), freed_by_b: float = 0.0,
) -> Problem:  # fmt: skip
    """Lay out the tasks of one step.

    Args:
        placement: per replica, the device of each stage.
        microbatches: of the step, over all replicas.
        costs: one value per stage.
        graph: which stage feeds which; default a chain.
        memory_limit: activations a device may hold (one number, or one per device); default no limit.
        split: B and W apart; else joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations and rebuild them by an R.
        freed_by_b: share of an activation that B frees already; the rest dies with W.

    Raises:
        ScheduleError: costs for another number of stages, or a memory limit that no order can keep.
    """
    places = tuple(tuple(row) for row in placement)
    stages = len(places[0])
    graph = StageGraph.chain(stages) if graph is None else graph
    rules = Rules() if rules is None else rules
    if costs.stages != stages:
        raise ScheduleError("costs", f"{costs.stages} values for {stages} stages", f"give 1 or {stages} values")
    devices = 1 + max(d for row in places for d in row)
    inputs, outputs = graph.inputs(), graph.outputs()
    p = Problem(
        places, graph, microbatches, rules, devices, [], [], [], [], [], [], [], [], [], [], [], [],
        [[] for _ in range(devices)], [],
    )  # fmt: skip
    number: dict[tuple[Kind, int, int], int] = {}
    for replica, row in enumerate(places):
        count = max(0, -(-(microbatches - replica) // len(places)))
        for s in range(stages):
            kinds: list[Kind] = ["F", "R"] if s in recompute else ["F"]
            no_b = rules.skip_first_b and not inputs[s]
            kinds += (["W"] if no_b else ["B", "W"]) if split else ["BW"]
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
                p.takes.append(float(kind == ("R" if s in recompute else "F")))
                share = 0.0 if no_b else freed_by_b
                p.frees.append({"B": share, "W": 1.0 - share, "BW": 1.0}.get(kind, 0.0))
    latency = delays(places, graph, costs.comm)
    p.before = [[] for _ in p.kind]
    p.after = [[] for _ in p.kind]
    for (kind, s, replica), c in number.items():
        for needed, at in dependencies(kind, s, inputs[s], outputs[s], s in recompute, rules):
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
    p.cap = limits
    _check_memory(p, recompute)
    return p


def lane_order(p: Problem) -> list[int]:
    """Lanes, each after those it depends on."""
    waits = [len(b) for b in p.before]
    ready = [c for c, k in enumerate(waits) if not k]
    for c in ready:
        for e, _ in p.after[c]:
            waits[e] -= 1
            if not waits[e]:
                ready.append(e)
    return ready


def _check_memory(p: Problem, recompute: Collection[int]) -> None:
    """Without recompute, a micro-batch that reaches its last stage lives on all the stages a device has of it."""
    if len(p.cap) != p.devices:
        raise ScheduleError("memory_limit", f"{len(p.cap)} values for {p.devices} devices", "give one per device")
    for row in p.placement:
        for d in range(p.devices):
            kept = sum(place == d and s not in recompute for s, place in enumerate(row))
            need = max(kept, 1 if d in row else 0)
            if p.cap[d] + 1e-9 < need:
                raise ScheduleError(
                    "memory_limit", f"{p.cap[d]:g} activations; one micro-batch on device {d} needs {need}",
                    f"use a number >= {need}",
                )  # fmt: skip
