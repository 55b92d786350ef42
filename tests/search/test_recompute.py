"""The choice of stages that recompute."""

import itertools

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.verify import verify
from raypipe.search import search
from raypipe.search.search import search_recompute


@pytest.mark.parametrize(("depth", "count"), [(3, 6), (4, 8), (6, 9)])
def test_merak_is_found(depth, count):
    """F = R = 1, BW = 2: the shifted critical path, 4N + 3(D - 2), with one activation a device."""
    costs = CostTable.even(depth, recompute=1)
    result = search_recompute((tuple(range(depth)),), count, costs, memory_limit=1, split=False)
    verify(result.schedule, 1)
    assert result.value == 4 * count + 3 * (depth - 2)
    assert depth - 1 not in {t.stage for t in result.schedule.tasks() if t.kind == "R"}


def test_with_memory_enough_nothing_is_recomputed():
    result = search_recompute(((0, 1, 2),), 6, CostTable.even(3, recompute=1), memory_limit=3)
    assert {t.kind for t in result.schedule.tasks()} == {"F", "B", "W"}
    assert result.gap == 0


@pytest.mark.slow
def test_against_every_choice_of_stages():
    """Three uneven stages in two activations: no choice of stages, each searched on its own, is shorter."""
    costs = CostTable(
        forward=(3, 2, 4), input_grad=(3, 4, 3), weight_grad=(2, 3, 2), recompute=(3, 2, 4), all_reduce=(0, 0, 0),
        update=(0, 0, 0), comm=1,
    )  # fmt: skip
    result = search_recompute(((0, 1, 2),), 6, costs, memory_limit=2, budget_s=3)
    verify(result.schedule, 2)
    assert max(peak_activations(result.schedule)) <= 2
    every = [
        search(((0, 1, 2),), 6, costs, memory_limit=2, recompute=chosen, budget_s=0.3).value
        for size in range(4)
        for chosen in itertools.combinations(range(3), size)
    ]
    assert result.value <= min(every)
    assert result.bound <= min(every)
