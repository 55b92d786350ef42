"""Asynchronous 1F1B: no bubbles in steady state, and the versions of weights that costs."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import unroll, weight_versions
from raypipe.schedule.verify import verify
from raypipe.simulate.period import period


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (2, 2), (4, 4), (4, 8), (5, 7), (8, 16)])
def test_no_bubble_between_steps(depth: int, count: int) -> None:
    for name in ("pipedream", "pipedream-2bw"):
        schedule = generate(name, Shape(devices=depth, microbatches=count))
        verify(schedule)
        assert period(schedule, CostTable.even(depth)) == 3 * count
        assert period(schedule, CostTable.even(depth, 2, 3, 4)) == 9 * count


@pytest.mark.parametrize(("depth", "count"), [(1, 2), (4, 4), (4, 9), (6, 6)])
def test_versions(depth: int, count: int) -> None:
    shape = Shape(devices=depth, microbatches=count)
    assert weight_versions(generate("pipedream", shape)) == tuple(depth - s for s in range(depth))
    assert weight_versions(generate("pipedream-2bw", shape)) == (2,) * depth
    assert weight_versions(generate("1f1b", shape)) == (1,) * depth


def test_version_budget() -> None:
    schedule = generate("pipedream", Shape(devices=4, microbatches=8))
    verify(schedule, version_limit=4)
    with pytest.raises(ScheduleError, match="keeps 4 versions of its weights, the limit is 2"):
        verify(schedule, version_limit=2)


def test_endless_order_is_1f1b_of_the_whole_run() -> None:
    for depth, count in ((4, 4), (4, 7), (3, 5)):
        steps = unroll(generate("pipedream", Shape(devices=depth, microbatches=count)), 3)
        assert steps.orders == generate("1f1b", Shape(devices=depth, microbatches=3 * count)).orders


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_fewer_micro_batches_than_devices_are_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="use 4 or more"):
        generate(name, Shape(devices=4, microbatches=3))
