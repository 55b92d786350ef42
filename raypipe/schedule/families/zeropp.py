"""ZeroPP: scheduling units of U micro-batches, stage by stage, with weight gradients in the bubbles."""

from __future__ import annotations

import math

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.greedy import Policy, order_greedily, ring, whole_step
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.shape import Shape


def zeropp(shape: Shape, costs: CostTable) -> Schedule:
    """Run units of U micro-batches strictly one after another; V stages per device, stage s on device s mod P.

    Inside a unit, forwards run breadth-first, stage by stage; input gradients as early as possible, the deepest stage
    first; weight gradients in the bubbles and at the end. A stage's micro-batches are contiguous, so that its
    parameters are gathered once for them. A unit's memory, min(N, U)*V activations of a chunk, is free before the next
    unit begins. With F = B = W = 1 and U dividing N, the span is 3VN for U >= 2P-1, and N(2P-1-U)/U more for P <= U <
    2P-1. The last unit may be smaller. A memory limit reduces U.

    Source: ZeroPP, sections 3.1 and 3.2.
    """
    depth, count, chunks = shape.devices, shape.microbatches, shape.chunks
    unit = count if shape.unit is None else shape.unit
    if shape.memory_limit is not None:
        if shape.memory_limit < chunks:
            raise ScheduleError(
                "memory_limit",
                f"{shape.memory_limit:g} activations; one micro-batch needs {chunks}",
                f"use {chunks} or more",
            )
        unit = min(unit, math.floor(shape.memory_limit) // chunks)
    placement = ring(shape)
    units = {n: _unit(placement, n, costs) for n in {unit, count % unit} if n}
    rows: list[list[Task]] = [[] for _ in range(depth)]
    for first in range(0, count, unit):
        for row, order in zip(rows, units[min(unit, count - first)].orders, strict=True):
            row += [Task(t.kind, t.stage, (t.mbs[0] + first,)) for t in order]
    return units[unit].with_orders(rows, microbatches=count)


def _unit(placement: tuple[int, ...], count: int, costs: CostTable) -> Schedule:
    policy = Policy(key=lambda t: (t.stage if t.kind == "F" else -t.stage, t.mbs[0]))
    found = order_greedily(whole_step("zeropp", placement, count), costs, policy)
    if found is None:  # cannot be: this policy has no limits
        raise ScheduleError("zeropp", "no order found", "report this")
    return found.schedule
