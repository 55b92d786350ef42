"""The simulator on schedules small enough to time by hand."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.simulate.engine import simulate


def pair(*orders: list[Task], placement: tuple[tuple[int, ...], ...] = ((0, 1),), count: int = 1) -> Schedule:
    return Schedule(
        name="by hand", placement=placement, orders=tuple(map(tuple, orders)), microbatches=count,
        graph=StageGraph.chain(2),
    )  # fmt: skip


F0, F1, BW0, BW1 = Task("F", 0, (0,)), Task("F", 1, (0,)), Task("BW", 0, (0,)), Task("BW", 1, (0,))


def table(**changes: object) -> CostTable:
    given: dict[str, object] = {
        "forward": (1, 2), "input_grad": (3, 4), "weight_grad": (5, 6), "recompute": (0, 0), "all_reduce": (0, 0),
        "update": (0, 0),
    }  # fmt: skip
    return CostTable(**{**given, **changes})  # type: ignore[arg-type]


def test_uneven_costs_and_latency() -> None:
    timeline = simulate(pair([F0, BW0], [F1, BW1]), table(comm=0.5))
    assert [(s.start, s.end) for s in timeline.spans[0]] == [(0, 1), (14, 22)]
    assert [(s.start, s.end) for s in timeline.spans[1]] == [(1.5, 3.5), (3.5, 13.5)]
    assert timeline.device_spans == (22, 12)
    assert timeline.bubble_ratio == pytest.approx(1 - 21 / 44)


def test_no_latency_inside_a_device() -> None:
    assert simulate(pair([F0, F1, BW1, BW0], placement=((0, 0),)), table(comm=9)).makespan == 21


def test_an_all_reduce_waits_for_all_holders_and_overlaps_compute() -> None:
    ar0, ar1 = Task("AR", 0, ()), Task("AR", 0, (), 1)
    up = [Task("F", 0, (1,), 1), Task("F", 1, (1,), 1), Task("BW", 1, (1,), 1), Task("BW", 0, (1,), 1)]
    schedule = pair(
        [F0, F1, BW1, BW0, ar0, Task("U", 0, ())], [*up, ar1, Task("F", 0, (2,), 1)], placement=((0, 0), (1, 1)),
        count=3,
    )  # fmt: skip
    timeline = simulate(
        pair(*[o for o in schedule.orders], placement=schedule.placement, count=3), table(all_reduce=(7, 0))
    )
    by_task = {s.task: (s.start, s.end) for row in timeline.spans for s in row}
    assert by_task[ar0] == by_task[ar1] == (21, 28)
    assert by_task[Task("F", 0, (2,), 1)] == (21, 22)
    assert by_task[Task("U", 0, ())] == (28, 28)
    assert timeline.makespan == 28


def test_deadlock_shows_the_grid_and_the_circle() -> None:
    f = [Task("F", 0, (m,)) for m in range(2)]
    orders = [f[0], Task("BW", 0, (0,)), f[1], Task("BW", 0, (1,))], [
        Task("F", 1, (1,)), Task("F", 1, (0,)), Task("BW", 1, (0,)), Task("BW", 1, (1,)),
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match="0BW0 waits for 1BW0") as caught:
        simulate(pair(*orders, count=2), table())
    assert ">1F1<" in str(caught.value)
    assert "1F1 waits for 0F1" in str(caught.value)


def test_missing_and_doubled_tasks() -> None:
    with pytest.raises(ScheduleError, match="waits for 0F0, which no device runs") as caught:
        simulate(pair([BW0], [F1, BW1]), table())
    assert ">0BW0<" in str(caught.value)
    with pytest.raises(ScheduleError, match="repeats the work of 0F0 on device 0"):
        simulate(pair([F0, F0, BW0], [F1, BW1]), table())


def test_all_reduces_in_opposite_orders_are_a_deadlock() -> None:
    rows = []
    for r in (0, 1):
        work = [Task(k, s, (r,), r) for k, s in (("F", 0), ("F", 1), ("BW", 1), ("BW", 0))]  # type: ignore[arg-type]
        rows.append([*work, *(Task("AR", s, (), r) for s in ((0, 1) if r else (1, 0)))])
    with pytest.raises(ScheduleError, match="in the same order on every device"):
        simulate(pair(*rows, placement=((0, 0), (1, 1)), count=2), table())
