"""The period in closed form; test_views.py has it beside many steps of an event-driven simulation."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_updates, place_gradient_sync, split_backward
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import gains_ahead, period


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
