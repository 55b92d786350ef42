"""GEMS: two replicas in opposite directions alternate, which needs the least memory."""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.chimera import check_bidirectional, placement
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.shape import Shape


def gems(shape: Shape, costs: CostTable) -> Schedule:
    """Alternate micro-batches between the directions; the next one's forward overlaps the current one's backward.

    With even costs, the makespan is (D-1)F + N(F + D*BW). A device holds one activation.

    Source: Jain et al. 2020 (GEMS); as a baseline in Chimera section 2.
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    where = placement(depth, 2)
    orders: list[list[Task]] = [[] for _ in range(depth)]
    for m in range(count):
        for stage, device in enumerate(where[m % 2]):
            orders[device] += [Task("F", stage, (m,), m % 2), Task("BW", stage, (m,), m % 2)]
    return Schedule.of_chain("gems", where, orders, count)
