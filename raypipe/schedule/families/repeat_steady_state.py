"""Make a long schedule from a short one by repeating its steady state.

List scheduling costs more than writing an order down, and between warm-up and drain its orders only repeat. So a
family orders a short step and stretches it.
"""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.walk import walk

_new = tuple.__new__  # a quarter of the time of Task(...), and long schedules are mostly this


def repeat_steady_state(schedule: Schedule, count: int, costs: CostTable, turn: int = 1) -> Schedule | None:
    """The schedule with ``count`` micro-batches, or None where it has no steady state to repeat.

    On every device the tasks from one forward to the one ``turn`` micro-batches later must be the same as the turn
    before, with as many of each kind. That turn is inserted as often as needed.

    Args:
        schedule: one stage per device, tasks of one micro-batch each, ids of each kind ascending on a device.
        count: more micro-batches than it has, by a multiple of ``turn``.
        costs: to check that more turns take no longer than the busiest device's work in them.
        turn: micro-batches of a turn.
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
    """Is the turn from ``begin`` to ``end`` the one from ``before``, ``turn`` micro-batches later?"""
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
    """Do more turns run, and take no more than the work of the busiest device? As many as there are devices are
    tried: a delay needs that many to come round.
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
