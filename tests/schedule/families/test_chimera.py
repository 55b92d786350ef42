"""Chimera's three concatenations, more pipelines, and the tight order; GEMS on the same placement."""

from fractions import Fraction

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate


def made(name: str, depth: int, count: int, **options: object) -> Schedule:
    schedule = generate(name, Shape(devices=depth, microbatches=count, **options))  # type: ignore[arg-type]
    verify(schedule)
    return schedule


def makespan(schedule: Schedule, recompute: float = 0) -> float:
    return simulate(schedule, CostTable.even(schedule.stages, recompute=recompute)).makespan


@pytest.mark.parametrize(("depth", "count"), [(4, 4), (4, 8), (4, 12), (6, 12), (8, 8), (8, 24)])
def test_halving(depth: int, count: int) -> None:
    schedule = made("chimera", depth, count, concat="halving")
    assert (schedule.size, schedule.microbatches) == (Fraction(1, 2), 2 * count)
    assert makespan(schedule) == 3 * count + depth - 2
    direct = simulate(made("chimera", depth, count), CostTable.even(depth))
    assert simulate(schedule, CostTable.even(depth)).peak_activations == direct.peak_activations


@pytest.mark.parametrize(("depth", "units"), [(4, 1), (4, 2), (4, 3), (6, 2), (8, 1), (8, 3)])
def test_doubling(depth: int, units: int) -> None:
    """F of a pair 2, BW + R 3; where 1F1B with recompute takes (N + D - 1) * 4."""
    count = 2 * depth * units
    schedule = made("chimera", depth, count, concat="doubling")
    assert makespan(schedule, recompute=1) == units * (9 * depth - 2) + 2 * (depth - 2)
    assert {len(t.mbs) for t in schedule.tasks() if t.kind == "F"} == {2}


@pytest.mark.parametrize("concat", ["direct", "doubling", "halving"])
@pytest.mark.parametrize("pipelines", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 12, 13, 15, 16, 21])
def test_any_number_of_micro_batches(count: int, pipelines: int, concat: str) -> None:
    schedule = made("chimera", 4, count, pipelines=pipelines, concat=concat)
    if concat != "doubling":  # few pairs use few pipelines
        assert len({t.replica for t in schedule.tasks()}) == min(count, pipelines)
    full = sum(len(t.mbs) for t in schedule.tasks() if t.kind == "F") * schedule.size
    assert full == count * 4


@pytest.mark.parametrize("depth", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("extra", [0, 2, 4, 10])
def test_tight(depth: int, extra: int) -> None:
    count = depth + extra
    schedule = made("chimera-tight", depth, count)
    assert makespan(schedule) == 3 * count + 2 * (depth - 2)
    assert max(simulate(schedule, CostTable.even(depth)).peak_activations) <= depth


@pytest.mark.parametrize(("depth", "count"), [(4, 16), (8, 24), (8, 32)])
def test_tight_beats_1f1b_where_direct_loses(depth: int, count: int) -> None:
    linear = makespan(made("1f1b", depth, count))
    assert makespan(made("chimera-tight", depth, count)) < linear < makespan(made("chimera", depth, count))


@pytest.mark.parametrize(("depth", "count", "forward", "backward"), [(4, 4, 1, 2), (8, 5, 3, 4), (2, 1, 1, 1)])
def test_gems(depth: int, count: int, forward: float, backward: float) -> None:
    costs = CostTable.even(depth, forward, backward / 2, backward / 2)
    timeline = simulate(made("gems", depth, count), costs)
    assert timeline.makespan == (depth - 1) * forward + count * (forward + depth * backward)
    assert timeline.peak_activations == (1,) * depth


@pytest.mark.parametrize("name", ["chimera", "chimera-tight", "gems"])
def test_an_odd_depth_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match="use 2 or 4"):
        made(name, 3, 3)
