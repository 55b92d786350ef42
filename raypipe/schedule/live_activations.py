"""Live activations per device; they depend on the order only, because a device runs one task at a time."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Backward, Schedule, Task, grid


def recomputed_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs that have an R task."""
    return {(t.stage, mb) for t in schedule.tasks() if t.kind == "R" for mb in t.mbs}


def births(task: Task, recomputed: set[tuple[int, int]]) -> int:
    """Return the number of activations that become alive when the task starts; recomputed ones do at their R."""
    if task.kind == "F":
        return sum((task.stage, mb) not in recomputed for mb in task.mbs) if recomputed else len(task.mbs)
    return len(task.mbs) if task.kind == "R" else 0


def deaths(task: Task, backwards: Sequence[Backward]) -> int:
    """Return the number of activations freed by the task; B frees none where weight gradients still need them.

    Args:
        task: of any kind.
        backwards: ``schedule.backwards``.
    """
    return len(task.mbs) if task.kind in backwards[task.stage].last else 0


def live_counts(schedule: Schedule) -> list[list[int]]:
    """Return ``[device][position]``: the activations alive while that task runs, counted per micro-batch id."""
    again, backwards = recomputed_pairs(schedule), schedule.backwards
    rows = []
    for order in schedule.orders:
        alive, row = 0, []
        for task in order:
            alive += births(task, again)
            row.append(alive)
            alive -= deaths(task, backwards)
        rows.append(row)
    return rows


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return the peak of live activations per device, in units of one stage and full micro-batch.

    An activation is alive from the start of F (of R if recomputed) to the end of the stage's last task for it: W or BW,
    B in a frozen stage, F in one without a backward. An id that stands for half a micro-batch counts one half.
    """
    return tuple(float(max(row, default=0) * schedule.size) for row in live_counts(schedule))


def in_flight(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return, per (stage, device), the peak number of micro-batches between their F and the end of their backward."""
    most: dict[tuple[int, int], int] = {}
    for device, order in enumerate(schedule.orders):
        now: dict[int, int] = {}
        for task in order:
            here = task.stage, device
            now[task.stage] = now.get(task.stage, 0) + len(task.mbs) * (task.kind == "F")
            most[here] = max(most.get(here, 0), now[task.stage])
            now[task.stage] -= deaths(task, schedule.backwards)
    return most


def check_memory(schedule: Schedule, limit: float) -> None:
    """Check that no device holds more than ``limit`` activations.

    Raises:
        ScheduleError: a device exceeds the limit; the first task above it is marked.
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
