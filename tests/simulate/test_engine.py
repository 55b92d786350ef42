"""The simulator on schedules small enough to time by hand, and what is read off its timelines."""

import itertools

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.passes import split_backward
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound, one_machine
from raypipe.simulate.timeline import critical_path, live_activations


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


# Critical path, live activations, lower bound: against formulas and against brute force on small schedules.


@pytest.mark.parametrize("depth", [4, 6, 8, 12])
def test_chimera_critical_path(depth: int) -> None:
    """D = N, BW = 2F: D forwards and 2D - 2 backwards (the paper's example: 6 and 10 at D = 6)."""
    costs = CostTable.even(depth)
    path = critical_path(simulate(generate("chimera", Shape(devices=depth, microbatches=depth)), costs))
    assert (path.forwards, path.backwards) == (depth, 2 * depth - 2)


def test_live_activations_over_time() -> None:
    timeline = simulate(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2))
    assert live_activations(timeline) == (
        ((0, 1), (1, 2), (6, 1), (9, 0)),
        ((0, 0), (1, 1), (4, 1), (7, 0)),
    )
    for row, peak in zip(live_activations(timeline), timeline.peak_activations, strict=True):
        assert max(alive for _, alive in row) == peak


def test_lower_bound_of_the_contract() -> None:
    assert lower_bound(generate("1f1b", Shape(devices=4, microbatches=4)), CostTable.even(4)) == 15


@pytest.mark.parametrize(("depth", "count"), [(2, 3), (4, 8), (5, 5)])
def test_lower_bound_of_a_linear_pipeline(depth: int, count: int) -> None:
    """F = B = W: no linear schedule beats 3N + D - 1 (PAPERS, "checked")."""
    assert lower_bound(generate("gpipe", Shape(devices=depth, microbatches=count)), CostTable.even(depth)) == (
        3 * count + depth - 1
    )


def test_one_machine_against_all_preemptive_orders() -> None:
    """Unit pieces in every order; a piece may not start before its job's head."""
    for jobs in ([(0, 2, 1), (1, 1, 4), (3, 1, 0)], [(0, 1, 0), (0, 2, 3), (2, 1, 5)], [(2, 2, 2), (0, 1, 7)]):
        pieces = [k for k, (_, time, _) in enumerate(jobs) for _ in range(time)]
        best = float("inf")
        for order in set(itertools.permutations(pieces)):
            now, ends = 0.0, {}
            for k in order:
                now = max(now, jobs[k][0]) + 1
                ends[k] = now
            best = min(best, max(end + jobs[k][2] for k, end in ends.items()))
        assert one_machine([(float(r), float(p), float(q)) for r, p, q in jobs]) == best


def test_lower_bound_against_all_orders_of_a_small_step() -> None:
    """Two devices, two micro-batches, split backward: the best of every order there is."""
    costs = CostTable(forward=(1, 2), input_grad=(2, 1), weight_grad=(1, 3), comm=0.5)
    made = split_backward(generate("gpipe", Shape(devices=2, microbatches=2)))
    bound = lower_bound(made, costs)
    rows = [[o for o in set(itertools.permutations(row)) if in_turn(o)] for row in made.orders]
    best = min(spent for orders in itertools.product(*rows) if (spent := makespan_or_none(made, orders, costs)))
    assert 0.9 * best <= bound <= best


def in_turn(order: tuple[Task, ...]) -> bool:
    """Micro-batch 0 before 1 in F and in B, and F, B, W of each in that order."""
    place = {(t.kind, t.mbs): k for k, t in enumerate(order)}
    turns = all(place[kind, (0,)] < place[kind, (1,)] for kind in ("F", "B"))
    return turns and all(place["F", (m,)] < place["B", (m,)] < place["W", (m,)] for m in (0, 1))


def makespan_or_none(made: Schedule, orders: tuple[tuple[Task, ...], ...], costs: CostTable) -> float | None:
    try:
        return simulate(made.with_orders(orders), costs).makespan
    except ScheduleError:  # these two orders wait for each other
        return None


def test_empty_devices_are_no_trouble() -> None:
    idle = Schedule(
        name="one busy", placement=((0,),), orders=((Task("F", 0, (0,)), Task("BW", 0, (0,))), ()), microbatches=1,
        graph=StageGraph.chain(1),
    )  # fmt: skip
    timeline = simulate(idle, CostTable.even(1))
    assert timeline.device_spans == (3, 0)
    assert lower_bound(idle, CostTable.even(1)) == 3
    assert [s.task.kind for s in critical_path(timeline).spans] == ["F", "BW"]
