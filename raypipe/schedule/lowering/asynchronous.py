"""Step programs of asynchronous schedules: without a flush, a step's program also starts the next step.

A synchronous step is a separate program. The orders of PipeDream and PipeDream-2BW are continuous; they are cut after
the last backward of each step, so that a program still makes one step's updates. The forwards at its end belong to the
next step, and their micro-batch ids continue from N. Before an interruption (validation, checkpoint, the end of the
run) the pipeline drains, and the step after it fills the pipeline again.
"""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.deps import transfers
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.live_activations import unroll
from raypipe.schedule.passes.sync import held

Part = tuple[bool, bool]
"""(fills an empty pipeline, drains it at the end)."""
WHOLE: Part = (True, True)


def parts(schedule: Schedule) -> dict[Part, Schedule]:
    """Return the step programs of a schedule as schedules: one if it flushes, otherwise one per way to begin and end.

    Except for WHOLE, these are not complete schedules: tasks of the next step have micro-batch ids from N, and forwards
    that the step before ran are missing.
    """
    if schedule.versions == "flush":
        return {WHOLE: schedule}
    count = schedule.microbatches
    three = unroll(schedule, 3)
    cuts = list(zip(*(_cuts(three, (k + 1) * count) for k in range(3)), strict=True))
    result = {
        WHOLE: [list(order) for order in unroll(schedule, 1).orders],
        (True, False): [list(order[: cut[0]]) for order, cut in zip(three.orders, cuts, strict=True)],
        (False, False): [_shift(order[cut[0] : cut[1]], count) for order, cut in zip(three.orders, cuts, strict=True)],
        (False, True): [
            _shift(order[cut[1] : cut[2]], 2 * count) for order, cut in zip(three.orders, cuts, strict=True)
        ],
    }
    return {part: schedule.with_orders(_updated(schedule, rows)) for part, rows in result.items()}


def _cuts(schedule: Schedule, until: int) -> list[int]:
    """Per device, the position after its last task of the micro-batches below ``until``.

    A frozen stage without a backward, which waits for nobody, also runs the later forwards that other devices have
    before theirs.
    """
    ends = [backward.last for backward in schedule.backwards]
    cuts = [
        1 + max(i for i, t in enumerate(order) if t.kind in ends[t.stage] and t.mbs[0] < until)
        for order in schedule.orders
    ]
    taken = transfers(schedule.graph, schedule.rules).taken
    where = {
        (task.stage, mb): (device, i)
        for device, order in enumerate(schedule.orders)
        for i, task in enumerate(order)
        if task.kind == "F"
        for mb in task.mbs
    }
    todo = list(range(schedule.devices))
    while todo:
        device = todo.pop()
        forwards = [task for task in schedule.orders[device][: cuts[device]] if task.kind == "F"]
        sources = {(s, mb) for task in forwards for _, s in taken.get(("F", task.stage), ()) for mb in task.mbs}
        for other, i in map(where.__getitem__, sources):
            if i >= cuts[other]:
                cuts[other] = i + 1
                todo.append(other)
    return cuts


def _shift(order: tuple[Task, ...], by: int) -> list[Task]:
    return [t._replace(mbs=tuple(m - by for m in t.mbs)) for t in order]


def _updated(schedule: Schedule, rows: list[list[Task]]) -> list[list[Task]]:
    """Insert the updates: after every micro-batch's last task (stash), or once at the end, after the all-reduces."""
    if schedule.versions == "stash":
        if schedule.replicas > 1:
            raise ScheduleError(
                "replicas",
                f"{schedule.name} updates after every micro-batch, so replicas would diverge",
                "use one replica, or pipedream-2bw",
            )
        ends = [backward.last for backward in schedule.backwards]
        return [
            [u for t in row for u in ((t, Task("U", t.stage, (), t.replica)) if t.kind in ends[t.stage] else (t,))]
            for row in rows
        ]
    shared = schedule.replicas > 1
    closing = [
        [*(Task("AR", s, (), r) for s, r in pairs if shared), *(Task("U", s, (), r) for s, r in pairs)]
        for pairs in held(schedule)
    ]
    return [row + end for row, end in zip(rows, closing, strict=True)]
