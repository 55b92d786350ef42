"""Merge tasks that were given time slots into one order per device."""

from __future__ import annotations

from collections.abc import Iterable

from raypipe.schedule.ir import Task

Slotted = tuple[int, int, Task]
"""(device, slot, task)."""


def merge(devices: int, slotted: Iterable[Slotted]) -> tuple[tuple[Task, ...], ...]:
    """Order each device's tasks by slot; tasks that depend on each other must have increasing slots.

    Sorting by slot cannot deadlock then: the earliest slot not yet run never waits for a later one.
    """
    rows: list[list[tuple[int, int, Task]]] = [[] for _ in range(devices)]
    for n, (device, slot, task) in enumerate(slotted):
        rows[device].append((slot, n, task))
    return tuple(tuple(task for _, _, task in sorted(row, key=lambda x: x[:2])) for row in rows)
