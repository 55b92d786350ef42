"""ZB-H1, ZB-H2 and ZB-V: closed forms at even costs, budgets at any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.greedy import Policy, order_greedily, whole_step
from raypipe.schedule.families.zero_bubble import repeat_steady_state
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline

COSTS = [(1, 1, 1), (10, 12, 8), (2, 3, 1), (1, 2, 1), (3, 2, 2), (7, 11, 5)]


def run(name: str, costs: CostTable, **shape: object) -> Timeline:
    made = Shape(**shape)  # type: ignore[arg-type]
    schedule = generate(name, made, costs)
    verify(schedule)
    return simulate(schedule, costs)


@pytest.mark.parametrize("unit", COSTS)
@pytest.mark.parametrize(("depth", "count"), [(1, 2), (2, 4), (4, 8), (4, 9), (8, 16), (4, 50), (8, 61)])
@pytest.mark.parametrize("latency", [0, 1 / 8, 1 / 2])
def test_h1_reaches_the_best_makespan_within_1f1b_memory(
    depth: int, count: int, unit: tuple[int, int, int], latency: float
) -> None:
    """Latency in W's: above W/2 the D micro-batches in flight no longer cover the round trip."""
    forward, grad, weight = unit
    latency *= weight
    timeline = run("zb-h1", CostTable.even(depth, *unit, comm=latency), devices=depth, microbatches=count)
    assert timeline.makespan <= count * sum(unit) + (depth - 1) * (forward + grad - weight + 4 * latency)
    assert max(timeline.peak_activations) <= depth


@pytest.mark.parametrize("unit", COSTS)
@pytest.mark.parametrize(("depth", "count"), [(2, 4), (4, 8), (8, 16), (4, 50), (8, 61)])
def test_h2_reaches_the_best_span_within_twice_the_memory(depth: int, count: int, unit: tuple[int, int, int]) -> None:
    forward, grad, weight = unit
    timeline = run("zb-h2", CostTable.even(depth, *unit), devices=depth, microbatches=count)
    best = count * sum(unit) + max(0, (depth - 1) * (forward + grad - 2 * weight))
    assert max(timeline.device_spans) == best
    assert max(timeline.peak_activations) <= 2 * depth - 1


def test_the_numbers_of_the_issue() -> None:
    h1, h2 = (run(name, CostTable.even(4), devices=4, microbatches=8) for name in ("zb-h1", "zb-h2"))
    assert (h1.makespan, max(h1.device_spans), max(h1.peak_activations)) == (27, 27, 4)
    assert (h2.makespan, max(h2.device_spans), max(h2.peak_activations)) == (27, 24, 7)
    assert run("zb-h1", CostTable.even(4, 10, 12, 8), devices=4, microbatches=8).makespan == 282


@pytest.mark.parametrize(("depth", "count"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 9), (6, 20), (8, 16)])
def test_v_has_no_bubble_in_its_span(depth: int, count: int) -> None:
    costs = CostTable.even(2 * depth, 0.5, 0.5, 0.5)
    timeline = run("zb-v", costs, devices=depth, microbatches=count)
    assert max(timeline.device_spans) == period(timeline.schedule, costs) == 3 * count
    assert max(timeline.peak_activations) == 2 * depth
    assert timeline.schedule.placement[0][0] == timeline.schedule.placement[0][-1] == 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["zb-h1", "zb-h2", "zb-v"]), depth=st.integers(1, 5), count=st.integers(1, 30),
    limit=st.integers(2, 6), data=st.data(),
)  # fmt: skip
def test_uneven_costs_and_memory_limits(name: str, depth: int, count: int, limit: int, data: st.DataObject) -> None:
    shape = Shape(devices=depth, microbatches=count, memory_limit=limit)
    n = stages_of(name, shape)
    draw = [tuple(data.draw(st.integers(0, 9)) for _ in range(n)) for _ in range(3)]
    costs = CostTable(
        forward=draw[0], input_grad=draw[1], weight_grad=draw[2], comm=data.draw(st.sampled_from([0, 0.5])),
    )  # fmt: skip
    schedule = generate(name, shape, costs)
    verify(schedule, memory_limit=limit)


def test_a_limit_nobody_can_meet() -> None:
    with pytest.raises(ScheduleError, match="memory_limit"):
        generate("zb-h1", Shape(devices=2, microbatches=4, memory_limit=0.5))
    with pytest.raises(ScheduleError, match="memory_limit"):
        generate("zb-v", Shape(devices=2, microbatches=4, memory_limit=1))


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_stretched_order_is_as_good_as_a_long_one(turn: int) -> None:
    costs = CostTable.even(4, 10, 12, 8)
    policy = Policy(patience=0.5, limit=4, ahead=lambda s: 4 - s)
    short = order_greedily(whole_step("short", (0, 1, 2, 3), 20), costs, policy)
    assert short is not None
    longer = repeat_steady_state(short.schedule, 20 + 6 * turn, costs, turn)
    assert longer is not None
    verify(longer)
    assert simulate(longer, costs).makespan == short.makespan + 6 * turn * 30


def test_nothing_to_stretch_in_a_step_without_a_steady_state() -> None:
    assert repeat_steady_state(whole_step("not in turn", (0, 1), 6), 12, CostTable.even(2)) is None
