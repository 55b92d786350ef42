"""The numbers of issue 4 that need no emulator; formulas where there are some, proven optima elsewhere."""

import random

import pytest

from raypipe.auto import search
from raypipe.auto.placements import placed
from raypipe.schedule import Shape
from raypipe.schedule.costs import CostTable
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate


def checked(found, costs, memory):
    """The order is a whole step within the memory, and as long as it says."""
    verify(found.schedule, memory)
    timeline = simulate(found.schedule, costs)
    assert timeline.makespan == pytest.approx(found.makespan)
    if memory is not None:
        assert max(timeline.peak_activations) <= memory
    return found


def line(depth):
    return (tuple(range(depth)),)


@pytest.mark.parametrize("depth", [4, 5, 8, 12, 16])
@pytest.mark.parametrize("times", [(10, 10, 10, 1), (10, 12, 8, 1), (10, 20, 10, 2)])
@pytest.mark.parametrize("rounds", [2, 3])
def test_even_line_in_1f1bs_memory(depth, times, rounds):
    """PAPERS, "checked": no order within that memory ends earlier, and the bound says so."""
    f, b, w, c = times
    count = rounds * depth
    costs = CostTable.even(depth, f, b, w, comm=c)
    found = checked(search(line(depth), count, costs, memory_limit=depth), costs, depth)
    assert found.value == count * (f + b + w) + (depth - 1) * (f + b - w) + 4 * (depth - 1) * c
    assert found.gap == 0


@pytest.mark.parametrize(("memory", "at_most"), [(6, 704), (4, 916)])
def test_tight_line(memory, at_most):
    """Optima by constraint programming: 700 and 912 (``python -m tests.bench.auto_tight`` proves them)."""
    costs = CostTable.even(8, 10, 12, 8, comm=1)
    found = search(line(8), 16, costs, memory_limit=memory, budget_s=8, enough=at_most)
    assert checked(found, costs, memory).value <= at_most


@pytest.mark.parametrize(("memory", "at_most"), [(6, 410), (4, 510), (8, 376)])
def test_v(memory, at_most):
    """Optima by constraint programming: 406, 505, 372."""
    placement = placed("v", Shape(devices=4, microbatches=8, chunks=2))
    costs = CostTable.even(8, 5, 10, 5, comm=2)
    found = search(placement, 8, costs, memory_limit=memory, budget_s=12, enough=at_most)
    assert checked(found, costs, memory).value <= at_most


@pytest.mark.parametrize(("depth", "count"), [(4, 8), (4, 12), (6, 12), (6, 18), (8, 16), (8, 24)])
def test_bidirectional(depth, count):
    """BW = 2F in D activations: 3N + 2(D - 2), which direct concatenation misses (PAPERS, "checked")."""
    placement = placed("bidirectional", Shape(devices=depth, microbatches=count))
    costs = CostTable.even(depth)
    goal = 3 * count + 2 * (depth - 2)
    joint = search(placement, count, costs, memory_limit=depth, split=False, budget_s=8, enough=goal)
    assert checked(joint, costs, depth).value <= goal
    assert (
        checked(search(placement, count, costs, memory_limit=depth, budget_s=8, enough=goal), costs, depth).value < goal
    )


def test_uneven_line_in_twice_the_memory():
    """Stages uneven by up to 25 %: within 1 % of the bound on average."""
    rng = random.Random(4)
    gaps = []
    for depth in (4, 8, 16):
        for rounds in (1, 2, 4):
            times = [tuple(t * rng.uniform(1, 1.25) for _ in range(depth)) for t in (10, 12, 8)]
            zeros = (0.0,) * depth
            costs = CostTable(
                forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros,
                update=zeros, comm=rng.choice((0, 1, 2)),
            )  # fmt: skip
            found = search(line(depth), rounds * depth, costs, memory_limit=2 * depth, budget_s=1.5)
            gaps.append(checked(found, costs, 2 * depth).gap)
    assert sum(gaps) / len(gaps) <= 0.01
