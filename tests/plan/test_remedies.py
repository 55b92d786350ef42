"""The least memory of all plans, and whether any fits, are those of all plans played one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.choice import PlanChoice, choice_of
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.remedies import _fitting, _in_turn, _small, _smallest
from tests.plan.conftest import MIB, make_job, make_profile


def played(choice: PlanChoice) -> list[Prediction]:
    """Every schedule on every grid, undivided and divided in every way over groups of every size, recomputing all."""
    result = []
    for grid in _small(choice.grids):
        for c in _in_turn(choice, grid, every=True):
            judge = choice.judge.of(c)
            for way in {c, *judge.shard_ways(c)}:
                try:
                    result.append(judge.predict(replace(way, update="wait", recompute="full")))
                except ScheduleError:
                    continue
    return result


@pytest.mark.parametrize(("mib", "fits"), [(150, False), (200, False), (400, True)])
def test_least_memory_is_that_of_all_plans(mib: int, fits: bool) -> None:
    profile = make_profile(layers=4, devices=4, seed=mib, memory_bytes=mib * MIB)
    choice = choice_of(make_job(layers=4, batch=4), profile, 4)
    every = played(choice)
    least = min(p.excess for p in every)
    assert min(p.excess for _, p in _smallest(choice, every=True, most_s=60.0)) == pytest.approx(least, rel=1e-9)
    assert (_fitting(choice) is not None) == (least <= 0) == fits
    for p in every:
        assert choice.judge.of(p.candidate).room_on(p.candidate.grid) >= -p.excess - 1e-6
