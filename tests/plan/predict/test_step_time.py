"""The step's time from its parts is that of the simulator, on all data-parallel copies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import SYNCS
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.step_time import StepOverheads, step_time
from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.shape import Shape
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from tests.plan.predict.test_step_bound import random_costs

FLUSHING = [n for n in SCHEDULES if n != "dapple" and not n.startswith("pipedream")]


@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize("copies", [1, 3])
def test_one_copy_stands_for_all(name: str, copies: int) -> None:
    rng = random.Random(f"{name} {copies}")
    chunks = 2 if "chunks" in SCHEDULES[name].options else 1
    count = rng.randint(1, 9) if not SCHEDULES[name].paired else 2 * rng.randint(4, 6)
    named = generate(name, Shape(devices=4, microbatches=count, chunks=chunks))
    schedule = named.unpaired()  # as a run executes it
    costs = random_costs(schedule.stages, rng)
    everywhere = replicate(schedule, copies)
    for sync in SYNCS:
        synced = place_gradient_sync(everywhere, sync)
        free = step_time(Order(named), costs, sync, StepOverheads(copies=copies))
        assert free.step == pytest.approx(period(add_updates(synced), costs), rel=1e-9)
        barrier = step_time(Order(schedule), costs, sync, StepOverheads(copies=copies, norm="wait", norm_s=0.25))
        updates = max(
            sum(costs.update[s] for row in schedule.placement for s in range(len(row)) if row[s] == d)
            for d in range(schedule.devices)
        )  # fmt: skip
        assert barrier.step == pytest.approx(simulate(synced, costs).makespan + 0.25 + updates, rel=1e-9)
        assert barrier.compute == pytest.approx(simulate(schedule, costs).makespan, rel=1e-12)
        assert barrier.busy == pytest.approx(sum(simulate(schedule, costs).busy) / 4, rel=1e-12)


def test_eager_sums_are_never_later_than_lazy_ones() -> None:
    """Nothing waits for a sum but the update, so the search may look at the two ends alone."""
    for seed in range(20):
        rng = random.Random(seed)
        schedule = generate("chimera", Shape(devices=4, microbatches=rng.randint(2, 8)))
        costs = random_costs(4, rng)
        steps = [step_time(Order(schedule), costs, s, StepOverheads(copies=2, norm="wait")).step for s in SYNCS]
        assert steps[2] <= steps[1] * (1 + 1e-12) <= steps[0] * (1 + 2e-12)


def test_asynchronous_steps_add_what_lies_between_two_of_them() -> None:
    costs = replace(random_costs(4, random.Random(1)), comm=0.0, update=(0.5,) * 4, all_reduce=(2.0,) * 4)
    shape = Shape(devices=4, microbatches=8)
    one = step_time(Order(generate("pipedream-2bw", shape)), costs, "lazy", StepOverheads())
    two = step_time(Order(generate("pipedream-2bw", shape)), costs, "lazy", StepOverheads(copies=2))
    assert (one.step - one.compute, two.step - two.compute) == pytest.approx((0.5, 2.5))
    stashed = step_time(Order(generate("pipedream", shape)), costs, "lazy", StepOverheads())
    assert stashed.step - stashed.compute == pytest.approx(4.0)


def test_an_order_that_cannot_run_is_an_error() -> None:
    schedule = generate("1f1b", Shape(devices=2, microbatches=2))
    broken = schedule.with_orders([schedule.orders[0][::-1], schedule.orders[1]])
    with pytest.raises(ScheduleError, match="wait"):
        step_time(Order(broken), random_costs(2, random.Random(0)), "lazy", StepOverheads())
