"""Turn faults that ``link`` and ``walk`` found into one error with the task, what it waits for, and the device grid."""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.ir import grid
from raypipe.schedule.walk import WalkTimes


def fault_at(graph: TaskGraph, task: int, why: str, fix: str) -> ScheduleError:
    """Return an error that marks one task in the device grid."""
    device = graph.device[task]
    mark = (device, task - graph.first[device])
    where = f"device {device}, position {mark[1]}, task {graph.tasks[task]}"
    return ScheduleError(where, f"{why}\n{grid(graph.schedule, mark)}", fix)


def check_links(graph: TaskGraph) -> None:
    """Check that no task occurs twice and that every dependency is provided by a task.

    Raises:
        ScheduleError: a check fails; the first such task, by position in its device's order, is marked.
    """
    if graph.doubled:
        early, late = min(graph.doubled, key=lambda pair: _position(graph, pair[1]))
        raise fault_at(
            graph, late, f"repeats the work of {graph.tasks[early]} on device {graph.device[early]}", "remove one"
        )
    if graph.missing:
        task, (kinds, stage, _), mb = min(graph.missing, key=lambda m: _position(graph, m[0]))
        needed = " or ".join(f"{stage}{kind}{mb}" for kind in kinds)
        raise fault_at(graph, task, f"waits for {needed}, which no device runs", f"add {needed} to an order")


def check_ran(graph: TaskGraph, done: WalkTimes) -> None:
    """Check that the schedule does not deadlock.

    Raises:
        ScheduleError: devices wait for each other in a cycle; the cycle's earliest task is marked.
    """
    if not done.stuck:
        return
    heads = {graph.device[i]: i for i in reversed(done.stuck)}  # prefer a device's compute task over its all-reduce
    waits: dict[int, int] = {}
    for i in heads.values():
        late = [p for p in graph.preds[i] if done.end[p] < 0]
        if late:
            waits[i] = late[0]
    seen: list[int] = []
    task = min(waits, key=lambda i: _position(graph, i)) if waits else done.stuck[0]
    while task not in seen and task in waits:
        seen.append(task)
        task = heads[graph.device[waits[task]]]
    cycle = seen[seen.index(task) :] if task in seen else [done.stuck[0]]
    first = min(cycle, key=lambda i: _position(graph, i))
    if first not in waits:
        raise fault_at(
            graph,
            first,
            "waits for the all-reduce of the stage's other devices, which they never reach",
            "issue the all-reduces in the same order on every device",
        )
    chain = ", ".join(f"{graph.tasks[i]} waits for {graph.tasks[waits[i]]}" for i in cycle if i in waits)
    raise fault_at(graph, first, f"can never run, the devices wait in a circle: {chain}", "reorder one of these tasks")


def _position(graph: TaskGraph, task: int) -> tuple[int, int]:
    return task - graph.first[graph.device[task]], graph.device[task]
