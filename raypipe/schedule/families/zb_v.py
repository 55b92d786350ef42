"""ZB-V: two stages per device, placed in a V, so that the first forward and the last stage are on the same device."""

from __future__ import annotations

import math

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.families.greedy import KINDS, Policy, Unordered, ordered, whole_step
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import Kind
from raypipe.schedule.shape import Shape
from raypipe.schedule.walk import walk


def zb_v(shape: Shape, costs: CostTable) -> Schedule:
    """Put stages d and 2D-1-d on device d: no bubbles in the span with 1F1B's memory (2D activations of a chunk).

    With F = B = W = 1 per device (1/2 per chunk) and N >= 2D, the span is 3N. For other costs, list scheduling within
    the same memory is also tried, and the order with the smaller span is returned. The first and the last stage share
    device 0, so tied embeddings need no message.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 6; the order: Qi et al. 2024 (controllable
    memory), arXiv:2405.15362, appendix.
    """
    depth, count = shape.devices, shape.microbatches
    cap = 2 * depth
    if shape.memory_limit is not None:
        if shape.memory_limit < 2:
            raise ScheduleError("memory_limit", f"{shape.memory_limit:g} activations; a V needs two", "use 2 or more")
        cap = min(cap, math.floor(shape.memory_limit))
    placement = vee(shape)
    best = _textbook(placement, count)
    span = _span(best, costs) if cap == 2 * depth else math.inf
    work = max(
        count * sum(c[s] for c in (costs.forward, costs.input_grad, costs.weight_grad) for s in (d, 2 * depth - 1 - d))
        for d in range(depth)
    )
    if span > work * (1 + 1e-12) and (span == math.inf or depth * count <= _SEARCHED):
        step = Unordered(whole_step("zb-v", placement, count), costs)
        for policy in _policies(depth, cap):
            found = ordered(step, policy, shorter_than=span)
            if found is not None and found.span < span:
                best, span = found.schedule, found.span
            if span <= work:  # no order is shorter
                break
    if span == math.inf:
        raise ScheduleError(
            "memory_limit", f"no order found within {cap} activations", f"use {2 * depth}, or a smaller problem"
        )
    return best


def vee(shape: Shape) -> tuple[int, ...]:
    """Return the device of each stage: 0 to D-1, then D-1 to 0."""
    return (*range(shape.devices), *reversed(range(shape.devices)))


_SEARCHED = 4096
"""Up to this many devices times micro-batches, list scheduling is compared with the textbook order."""


def _policies(depth: int, cap: int) -> list[Policy]:
    kinds: tuple[tuple[Kind, ...], ...] = (("B", "F", "W"), ("F", "B", "W"))
    ahead = (lambda s: max(1, cap - 1) if s < depth else cap, lambda s: max(1, cap // 2) if s < depth else cap)
    return [
        Policy(kinds=order, patience=patience, limit=cap, ahead=lead, key=_oldest)
        for order in kinds
        for patience in (0.0, 0.5)
        for lead in ahead
    ]


def _oldest(task: Task) -> tuple[int, ...]:
    """Older micro-batches first; of one, the later stage."""
    return task.mbs[0], -task.stage


def _span(schedule: Schedule, costs: CostTable) -> float:
    graph = link(schedule)
    done = walk(graph, costs.durations(schedule, graph.tasks), costs.comm)
    return max(done.end[b - 1] - done.start[a] for a, b in zip(graph.first, graph.first[1:], strict=False))


def _textbook(placement: tuple[int, ...], count: int) -> Schedule:
    """The paper's order: fill with forwards, turn at the bottom of the V, alternate both chunks, then drain."""
    depth = len(placement) // 2
    rows = []
    for d in range(depth):
        row = _Row(d, 2 * depth - 1 - d, count)
        row.repeat(2 * (depth - d) - 1, "Fd")
        row.repeat(d, "Fu Fd")
        row.repeat(depth - d, "Fu Bu Wu")
        while row.done["F", row.up] < count:
            row.repeat(1, "Fd Bd Wd Fu Bu Wu")
        row.repeat(d, "Bd Bu")
        row.repeat(depth - d, "Bd Wd")
        row.repeat(count, "Bu")
        row.repeat(count, "Bd")
        row.repeat(count, "Wu")
        row.repeat(count, "Wd")
        rows.append(tuple(row.tasks))
    return Schedule.of_chain("zb-v", [placement], rows, count)


class _Row:
    """Builds a device's order: ``Fd`` is the next forward of the stage down the V, ``Wu`` the next W of the one up."""

    def __init__(self, down: int, up: int, count: int) -> None:
        self.down, self.up, self.count = down, up, count
        self.tasks: list[Task] = []
        self.done: dict[tuple[Kind, int], int] = {(k, s): 0 for k in KINDS for s in (down, up)}

    def repeat(self, times: int, what: str) -> None:
        """Append the named tasks in sequence, ``times`` times; skip tasks that are used up or lack input."""
        for _ in range(times):
            had = len(self.tasks)
            for name in what.split():
                kind = next(k for k in KINDS if k == name[0])
                stage = self.down if name[1] == "d" else self.up
                m = self.done[kind, stage]
                before: dict[Kind, int] = {"F": self.count, "B": self.done["F", stage], "W": self.done["B", stage]}
                if m < before[kind]:
                    self.done[kind, stage] += 1
                    self.tasks.append(Task(kind, stage, (m,)))
            if len(self.tasks) == had:  # nor would any further time add one
                return
