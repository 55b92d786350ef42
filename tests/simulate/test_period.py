"""The period in closed form and of long series; test_views.py has both beside an event-driven simulation."""

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, split_backward
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import gains_ahead, period
from raypipe.simulate.series import series


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream", "pipedream-2bw", "auto"}))
def test_running_ahead_of_the_norm_takes_no_longer_than_needing_none(name: str) -> None:
    """With even costs; waiting for it makes every step as long as its makespan, which is what zero-bubble avoids."""
    base = generate(name, Shape(devices=4, microbatches=8))
    schedule, costs = add_updates(place_gradient_sync(base, "lazy")), CostTable.even(base.stages)
    free, wait, ahead = (period(schedule, costs, norm=norm) for norm in ("none", "wait", "optimistic"))
    assert wait == simulate(schedule, costs).makespan
    assert ahead == free
    gains = name in ("zb-h2", "zb-v", "zeropp", "fast-forward", "modulo")
    assert gains_ahead(schedule, costs) == (free < wait) == gains


def test_a_norm_needs_updates_to_wait_for_it() -> None:
    with pytest.raises(ScheduleError, match="no update"):
        period(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2), norm="wait")


def test_period_lies_between_the_busiest_device_and_the_makespan() -> None:
    for name in ("gpipe", "1f1b", "chimera"):
        schedule = split_backward(generate(name, Shape(devices=4, microbatches=8)))
        timeline = simulate(schedule, CostTable.even(4))
        assert max(timeline.busy) <= period(schedule, CostTable.even(4)) <= timeline.makespan


def test_period_of_1f1b_is_its_makespan() -> None:
    """Its first device cannot begin the next step before its last backward, which is the end of the step."""
    assert period(generate("1f1b", Shape(devices=4, microbatches=4)), CostTable.even(4)) == 21


def test_free_tasks_have_no_period() -> None:
    assert period(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2, 0, 0, 0)) == 0


# Many steps message by message settle down to the period; links that carry one message at a time hold them up.

STEPS = 60


def step(name: str, copies: int = 1, sync: str = "lazy") -> tuple[Schedule, CostTable]:
    shape = Shape(devices=4, microbatches=8, chunks=2 if "chunks" in SCHEDULES[name].options else 1)
    stages = stages_of(name, shape)
    flushes = not name.startswith("pipedream")  # the period leaves out what an asynchronous schedule's updates take
    costs = CostTable(
        forward=tuple(1 + s / 7 for s in range(stages)), input_grad=tuple(1.1 + s / 9 for s in range(stages)),
        weight_grad=tuple(0.9 - s / 20 for s in range(stages)), recompute=(0.8,) * stages,
        all_reduce=tuple(2 + s / 3 for s in range(stages)) if copies > 1 and flushes else (0.0,) * stages,
        update=(0.25 * flushes,) * stages, comm=tuple(0.3 + s / 10 for s in range(stages)),
    )  # fmt: skip
    base = generate(name, shape, costs)
    return add_updates(place_gradient_sync(replicate(base, copies), sync, costs)), costs


def rate(ends: tuple[float, ...]) -> float:
    """Mean step time late in a series; its last step, in which an asynchronous schedule drains, left out."""
    half = len(ends) // 2
    return (ends[-2] - ends[half]) / (len(ends) - 2 - half)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"chimera-tight"}))
@pytest.mark.parametrize("copies", [1, 2])
def test_a_long_series_runs_at_the_period(name, copies) -> None:
    if name == "pipedream" and copies > 1:
        pytest.skip("updates after every micro-batch")
    schedule, costs = step(name, copies)
    assert rate(series(schedule, costs, STEPS)) == pytest.approx(period(schedule, costs), rel=0.002)


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "interleaved-1f1b", "chimera"])
@pytest.mark.parametrize("sync", ["eager", "eager-opt"])
@pytest.mark.parametrize("norm", ["wait", "optimistic"])
def test_with_a_global_norm(name, sync, norm) -> None:
    schedule, costs = step(name, 2, sync)
    assert rate(series(schedule, costs, STEPS, norm=norm)) == pytest.approx(
        period(schedule, costs, norm=norm), rel=0.002
    )
    assert series(schedule, costs, 1)[0] == pytest.approx(simulate(schedule, costs).makespan)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("links", [(0.0, 5.0, 1.0), (4.0, 0.0, 3.0), (9.0, 9.0, 0.5)])
def test_an_endless_order_waits_for_slow_links(name, links) -> None:
    zeros = (0.0,) * 4
    costs = CostTable(
        forward=(5.0, 6.0, 9.0, 1.0), input_grad=(8.0, 4.0, 1.0, 3.0), weight_grad=(2.0, 6.0, 8.0, 4.0),
        recompute=zeros, all_reduce=zeros, update=zeros, comm=links,
    )  # fmt: skip
    schedule = generate(name, Shape(devices=4, microbatches=4), costs)
    ends = series(schedule, costs, 26)
    assert period(schedule, costs) == pytest.approx((ends[24] - ends[12]) / 12, rel=1e-9)


def test_an_asynchronous_step_takes_its_updates_too() -> None:
    """N (F + B + W) where nothing is waited for; PipeDream updates N times a step, 2BW once after its sum."""
    even = replace(CostTable.even(4), update=(0.5,) * 4, all_reduce=(2.0,) * 4)
    assert rate(series(step("pipedream")[0], even, STEPS)) == pytest.approx(8 * (3 + 0.5))
    assert rate(series(step("pipedream-2bw", 2)[0], even, STEPS)) == pytest.approx(8 * 3 + 0.5 + 2.0)


def test_a_link_carries_one_message_at_a_time() -> None:
    """Two stages, N forwards of 1 and messages of 3: the last arrives at 1 + 3N."""
    count = 5
    orders = [[Task("F", s, (m,)) for m in range(count)] for s in range(2)]
    schedule = Schedule(
        name="x", placement=((0, 1),), orders=tuple(map(tuple, orders)), microbatches=count, graph=StageGraph.chain(2)
    )
    costs = CostTable.even(2, 1.0)
    assert series(schedule, costs, 1) == (count + 1.0,)
    assert series(schedule, costs, 1, occupancy=0.5) == (count + 1.5,)  # shorter than a task: each waits for none
    assert series(schedule, costs, 1, occupancy=3.0) == (1 + 3.0 * count + 1,)
    assert series(schedule, costs, 2, occupancy=3.0)[1] == 1 + 2 * 3.0 * count + 1


def test_two_directions_are_two_links() -> None:
    schedule = add_updates(generate("1f1b", Shape(devices=2, microbatches=6)))
    costs = CostTable.even(2, 1.0, 1.0, 1.0)
    free = series(schedule, costs, 1)[0]
    assert series(schedule, costs, 1, occupancy=0.5)[0] == simulate(schedule, CostTable.even(2, comm=0.5)).makespan
    assert series(schedule, costs, 1, occupancy=0.5)[0] > free
