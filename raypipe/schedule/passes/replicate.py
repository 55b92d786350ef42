"""Replicate a schedule for data parallelism."""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule


def replicate(schedule: Schedule, copies: int) -> Schedule:
    """Return W copies of a schedule, each with its own devices, replicas and micro-batches.

    With D devices, R replicas and N micro-batch ids, copy w has devices w*D + d, replicas w*R + r and ids w*N + n.

    Raises:
        ScheduleError: ``copies`` is below 1.
    """
    if copies < 1:
        raise ScheduleError("replicas", f"{copies} copies", "use a whole number >= 1")
    if copies == 1:
        return schedule
    devices, replicas, count = schedule.devices, schedule.replicas, schedule.microbatches
    placement = [tuple(w * devices + d for d in row) for w in range(copies) for row in schedule.placement]
    orders = [
        [t._replace(mbs=tuple(w * count + m for m in t.mbs), replica=w * replicas + t.replica) for t in order]
        for w in range(copies)
        for order in schedule.orders
    ]
    sharding = schedule.sharding and replace(schedule.sharding, copies=copies * schedule.sharding.copies)
    return schedule.with_orders(orders, placement=tuple(placement), microbatches=copies * count, sharding=sharding)
