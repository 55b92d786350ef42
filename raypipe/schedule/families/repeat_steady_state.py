"""Make a long schedule from a short one by repeating its steady state.

List scheduling is slow for many micro-batches, and between warm-up and drain its orders only repeat. A family therefore
orders a short step and extends it.
"""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.walk import walk

_new = tuple.__new__  # takes a quarter of the time of Task(...), which dominates for long schedules


def repeat_steady_state(schedule: Schedule, count: int, costs: CostTable, turn: int = 1) -> Schedule | None:
    """Extend the schedule to ``count`` micro-batches; None if it has no steady state to repeat.

    On every device, the tasks from one forward to the forward ``turn`` micro-batches later must equal those of the turn
    before, with as many of each kind. That turn is repeated as often as needed.

    Args:
        schedule: a schedule with one stage per device, one micro-batch per task, and ascending ids per kind.
        count: number of micro-batches; larger than the schedule's by a multiple of ``turn``.
        costs: used to check that further turns take no longer than the busiest device's work in them.
        turn: number of micro-batches in a turn.
    """
    have = schedule.microbatches
    forwards = [[k for k, t in enumerate(order) if t.kind == "F"] for order in schedule.orders]
    tried = 0
    for a in sorted(range(turn, have - turn), key=lambda a: abs(a - 3 * have // 4)):
        places: list[tuple[int, int]] = []
        for order, at in zip(schedule.orders, forwards, strict=True):
            if not _repeats(order, at[a - turn], at[a], at[a + turn], turn):
                break
            places.append((at[a], at[a + turn]))
        else:
            if _steady(schedule, places, costs, turn):
                return _repeated(schedule, places, count - have, turn)
            tried += 1
            if tried == 3:
                return None
    return None


def _repeats(order: tuple[Task, ...], before: int, begin: int, end: int, turn: int) -> bool:
    """Return whether the tasks from ``begin`` to ``end`` equal those from ``before``, ``turn`` micro-batches later."""
    if end - begin != 3 * turn or begin - before != 3 * turn:
        return False
    return all(_later(t, turn) == u for t, u in zip(order[before:begin], order[begin:end], strict=True))


def _later(task: Task, by: int) -> Task:
    kind, stage, mbs, replica = task
    return _new(Task, (kind, stage, (mbs[0] + by,), replica))


def _repeated(schedule: Schedule, places: list[tuple[int, int]], extra: int, turn: int) -> Schedule:
    rows = []
    for order, (begin, end) in zip(schedule.orders, places, strict=True):
        row = list(order[:end])
        for by in range(turn, extra + 1, turn):
            row += [_later(t, by) for t in order[begin:end]]
        row += [_later(t, extra) for t in order[end:]]
        rows.append(row)
    return schedule.with_orders(rows, microbatches=schedule.microbatches + extra)


def _steady(schedule: Schedule, places: list[tuple[int, int]], costs: CostTable, turn: int) -> bool:
    """Return whether further turns can run and take no longer than the busiest device's work in them.

    As many turns as devices are simulated, and two more, because a delay takes one turn per device to propagate.
    """
    ends = []
    turns = schedule.devices + 2
    for extra in (0, turns * turn):
        longer = _repeated(schedule, places, extra, turn)
        graph = link(longer)
        done = walk(graph, costs.durations(longer, graph.tasks), costs.comm)
        if done.stuck:
            return False
        ends.append(max(done.end))
    work = max(map(sum, zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)))
    return ends[1] - ends[0] <= turns * turn * work * (1 + 1e-9)
