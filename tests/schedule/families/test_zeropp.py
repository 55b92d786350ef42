"""ZeroPP's units: spans and activations of the issue and of PAPERS ("checked"), and the limits of a unit."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.timeline import Timeline


def run(depth: int, chunks: int, count: int, unit: int | None, limit: float | None = None) -> Timeline:
    shape = Shape(devices=depth, microbatches=count, chunks=chunks, unit=unit, memory_limit=limit)
    costs = CostTable.even(depth * chunks)
    schedule = generate("zeropp", shape, costs)
    verify(schedule)
    return simulate(schedule, costs)


@pytest.mark.parametrize(("count", "unit", "makespan"), [(7, 7, 66), (8, 8, 75), (8, 4, 78), (8, 7, 88), (16, 7, 153)])
def test_the_numbers_of_the_issue(count: int, unit: int, makespan: float) -> None:
    """U = 7 does not divide 8 and 16: the partial last unit idles 16 and 9 in the longest span."""
    timeline = run(4, 3, count, unit)
    assert timeline.makespan == makespan
    assert max(timeline.peak_activations) == min(count, unit) * 3


@pytest.mark.parametrize(("depth", "chunks"), [(2, 2), (3, 2), (4, 2), (4, 3)])
def test_bubbles_in_the_span(depth: int, chunks: int) -> None:
    """N (2P-1-U)/U for P <= U <= 2P-1 dividing N; none above."""
    for unit in range(depth, 2 * depth + 2):
        count = 2 * unit
        idle = count * max(0, 2 * depth - 1 - unit) / unit
        timeline = run(depth, chunks, count, unit)
        assert max(timeline.device_spans) == pytest.approx(3 * chunks * count + idle, abs=1e-9)


def test_a_units_micro_batches_stay_together() -> None:
    schedule = generate("zeropp", Shape(devices=2, microbatches=6, chunks=2, unit=3))
    for order in schedule.orders:
        units = [t.mbs[0] // 3 for t in order]
        assert units == sorted(units)
        forwards = [t.stage for t in order if t.kind == "F" and t.mbs[0] < 3]
        assert forwards == sorted(forwards)


def test_limits() -> None:
    assert max(run(2, 2, 6, None, limit=5).peak_activations) == 4
    with pytest.raises(ScheduleError, match="one micro-batch needs 2"):
        run(2, 2, 6, None, limit=1)
    with pytest.raises(ScheduleError, match="7 micro-batches a unit, 6 in all"):
        run(2, 2, 6, 7)
