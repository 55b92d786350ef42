"""The period where it has a closed form; test_views.py has it, and series of steps, beside a simulation by events."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_updates, place_gradient_sync
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


def test_free_tasks_have_no_period() -> None:
    assert period(generate("1f1b", Shape(devices=2, microbatches=2)), CostTable.even(2, 0, 0, 0)) == 0


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("links", [(0.0, 5.0, 1.0), (4.0, 0.0, 3.0), (9.0, 9.0, 0.5)])
def test_an_endless_order_waits_for_slow_links(name, links) -> None:
    costs = CostTable(
        forward=(5.0, 6.0, 9.0, 1.0), input_grad=(8.0, 4.0, 1.0, 3.0), weight_grad=(2.0, 6.0, 8.0, 4.0), comm=links,
    )  # fmt: skip
    schedule = generate(name, Shape(devices=4, microbatches=4), costs)
    ends = series(schedule, costs, 26)
    assert period(schedule, costs) == pytest.approx((ends[24] - ends[12]) / 12, rel=1e-9)
