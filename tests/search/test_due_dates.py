"""List schedules by due dates: what they are for, devices with several unequal stages, and what they must keep."""

from __future__ import annotations

import random
from math import inf

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.search.list_scheduling import LaneArrays, list_schedule
from raypipe.search.priorities import PACES, portfolio
from raypipe.search.problem import Problem, build


def uneven(seed: int) -> Problem:
    """Twelve stages that differ by up to a factor of four, three a device anywhere along the model."""
    rng = random.Random(seed)
    row = [0, 1, 2, 3] * 3
    rng.shuffle(row)
    size = [rng.uniform(1, 4) for _ in row]
    f, b, w = (tuple(share * x for x in size) for share in (1.0, 1.1, 0.9))
    zeros = (0.0,) * len(row)
    costs = CostTable(
        forward=f, input_grad=b, weight_grad=w, recompute=zeros, all_reduce=zeros, update=zeros, comm=0.1
    )  # fmt: skip
    return build((row,), 12, costs, sizes=[(x, x) for x in size], memory_limit=[1.5 * sum(size)] * 4)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_due_dates_do_as_well_as_hundreds_of_other_settings_on_unequal_stages(seed) -> None:
    p = uneven(seed)
    layout = LaneArrays.of(p)
    settings = [s for s in portfolio(p) if s.reserve == "stages"]
    steps = [listed.makespan if (listed := list_schedule(layout, s)) else inf for s in settings]
    few, others = steps[: len(PACES)], steps[len(PACES) :]
    assert len(others) > 800
    assert min(few) < 1.005 * min(others)
    assert min(few) < min(others[:60])


def test_their_orders_keep_the_memory_limit_and_say_when_devices_end() -> None:
    p = uneven(5)
    layout, work = LaneArrays.of(p), max(sum(p.time[c] * p.count[c] for c in own) for own in p.lanes_of)
    for _, setting in zip(PACES, portfolio(p), strict=False):
        listed = list_schedule(layout, setting)
        assert listed is not None
        assert p.fits(listed.orders)
        assert listed.makespan == max(listed.ends)
        assert listed.span == max(listed.spans) >= work
