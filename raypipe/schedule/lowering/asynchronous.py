"""A step of an asynchronous schedule: there is no flush, so a step's program also starts the step after it.

A synchronous step is a program of its own. PipeDream's and PipeDream-2BW's device orders go on for ever; they are cut
after the last backward of each step, so that one program still makes one step's update (or updates), and its tail
of forwards already belongs to the next step: their micro-batch ids go on from N. Where the run stops for a moment
(validation, checkpoint, the end) the step before drains and the step after fills afresh.
"""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import WEIGHT_GRADIENTS
from raypipe.schedule.passes.sync import held
from raypipe.schedule.unroll import unroll

Part = tuple[bool, bool]
"""(fills afresh, drains at the end)."""
WHOLE: Part = (True, True)


def parts(schedule: Schedule) -> dict[Part, Schedule]:
    """The step programs of a schedule, as schedules: one if it flushes, else one per way to begin and to end.

    In all but WHOLE, tasks of the next step have micro-batch ids from N, and forwards that the step before ran are
    missing, so these are no complete schedules by themselves.
    """
    if schedule.versions == "flush":
        return {WHOLE: schedule}
    count = schedule.microbatches
    three = unroll(schedule, 3)
    cuts = [[_cut(order, (k + 1) * count) for k in range(3)] for order in three.orders]
    found = {
        WHOLE: [list(order[: _cut(order, count)]) for order in unroll(schedule, 1).orders],
        (True, False): [list(order[: cut[0]]) for order, cut in zip(three.orders, cuts, strict=True)],
        (False, False): [_shift(order[cut[0] : cut[1]], count) for order, cut in zip(three.orders, cuts, strict=True)],
        (False, True): [
            _shift(order[cut[1] : cut[2]], 2 * count) for order, cut in zip(three.orders, cuts, strict=True)
        ],
    }
    return {part: schedule.with_orders(_updated(schedule, rows)) for part, rows in found.items()}


def _cut(order: tuple[Task, ...], until: int) -> int:
    """Where a device has done the last weight gradient of the micro-batches below ``until``."""
    return 1 + max(i for i, t in enumerate(order) if t.kind in WEIGHT_GRADIENTS and t.mbs[0] < until)


def _shift(order: tuple[Task, ...], by: int) -> list[Task]:
    return [t._replace(mbs=tuple(m - by for m in t.mbs)) for t in order]


def _updated(schedule: Schedule, rows: list[list[Task]]) -> list[list[Task]]:
    """Put the updates in: after every weight gradient (stash), or once at the end with the gradient sums before it."""
    if schedule.versions == "stash":
        if schedule.replicas > 1:
            raise ScheduleError(
                "replicas", f"{schedule.name} updates after every micro-batch, each replica would drift away",
                "use one replica, or pipedream-2bw",
            )  # fmt: skip
        return [
            [u for t in row for u in ((t, Task("U", t.stage, (), t.replica)) if t.kind in WEIGHT_GRADIENTS else (t,))]
            for row in rows
        ]
    shared = schedule.replicas > 1
    closing = [
        [*(Task("AR", s, (), r) for s, r in pairs if shared), *(Task("U", s, (), r) for s, r in pairs)]
        for pairs in held(schedule)
    ]
    return [row + end for row, end in zip(rows, closing, strict=True)]
