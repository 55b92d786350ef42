"""Activations alive on a device: a matter of order alone, since a device runs one task at a time."""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.grid import grid
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import JOINT, WEIGHT_GRADIENTS


def recomputed_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """The (stage, micro-batch) pairs that have an R task."""
    return {(t.stage, mb) for t in schedule.tasks() if t.kind == "R" for mb in t.mbs}


def births(task: Task, again: set[tuple[int, int]]) -> int:
    """Activations that start to live when the task starts; a recomputed one lives from its R."""
    if task.kind == "F":
        return sum((task.stage, mb) not in again for mb in task.mbs) if again else len(task.mbs)
    return len(task.mbs) if task.kind == "R" else 0


def deaths(task: Task) -> int:
    """Activations whose last use is this task: weight gradients need them, so B alone frees nothing."""
    return len(task.mbs) if task.kind in WEIGHT_GRADIENTS else 0


def live_counts(schedule: Schedule) -> list[list[int]]:
    """Per device and position, micro-batch ids' activations alive while that task runs."""
    again = recomputed_pairs(schedule)
    rows = []
    for order in schedule.orders:
        alive, row = 0, []
        for task in order:
            alive += births(task, again)
            row.append(alive)
            alive -= deaths(task)
        rows.append(row)
    return rows


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Per device, most (stage, micro-batch) activations alive at once, in units of one stage's full micro-batch.

    Alive from the start of F (of R where recomputed) to the end of W or BW. An id that stands for half a
    micro-batch counts one half.
    """
    return tuple(float(max(row, default=0) * schedule.size) for row in live_counts(schedule))


def in_flight(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Most micro-batches of a stage between their F and the end of their backward, per (stage, device)."""
    most: dict[tuple[int, int], int] = {}
    for device, order in enumerate(schedule.orders):
        now: dict[int, int] = {}
        split = any(t.kind == "W" for t in order)
        ends = WEIGHT_GRADIENTS - JOINT if split else JOINT
        for task in order:
            step = len(task.mbs) * ((task.kind == "F") - (task.kind in ends))
            now[task.stage] = now.get(task.stage, 0) + step
            most[task.stage, device] = max(most.get((task.stage, device), 0), now[task.stage])
    return most


def check_memory(schedule: Schedule, limit: float) -> None:
    """Refuse a schedule that holds more than ``limit`` activations on some device.

    Raises:
        ScheduleError: with the first task above the limit marked.
    """
    for device, row in enumerate(live_counts(schedule)):
        for position, alive in enumerate(row):
            if alive * schedule.size > limit:
                raise ScheduleError(
                    f"device {device}, position {position}, task {schedule.orders[device][position]}",
                    f"holds {float(alive * schedule.size):g} activations, the limit is {limit:g}\n"
                    + grid(schedule, (device, position)),
                    f"{schedule.name} needs {max(peak_activations(schedule)):g}; raise the limit, or choose a schedule "
                    "or shape that holds fewer",
                )
