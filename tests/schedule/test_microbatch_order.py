"""Which of a step's unequal micro-batches goes first."""

from __future__ import annotations

from itertools import permutations

import pytest

from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.microbatch_order import RULES, OrderSearch
from raypipe.schedule.passes import replicate
from raypipe.schedule.shape import Shape
from raypipe.simulate.engine import simulate

TIMES = [1.0, 6.0, 2.0, 1.0, 9.0, 2.0, 1.0, 2.0]


def search_of(name: str, microbatches: int = 8, copies: int = 1) -> tuple[Schedule, OrderSearch]:
    schedule = generate(name, Shape(devices=4, microbatches=microbatches))
    return schedule, OrderSearch(schedule, CostTable.even(4), copies)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera", "gpipe"])
def test_even_micro_batches_take_what_the_simulator_says(name: str) -> None:
    schedule, search = search_of(name)
    assert search.seconds([3.0] * 8) == pytest.approx(simulate(schedule, CostTable.even(4)).makespan)
    assert search.best([3.0] * 8) is None


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "chimera"])
def test_a_long_micro_batch_does_not_stay_at_an_end(name: str) -> None:
    _, search = search_of(name)
    order = search.best(TIMES, budget_s=0.2)
    assert order is not None
    assert sorted(order) == list(range(8))
    assert search.seconds(TIMES, order) <= min(search.seconds(TIMES, rule(TIMES)) for rule in RULES)
    assert search.seconds(TIMES, order) < search.seconds(TIMES)


def test_it_is_near_the_best_of_all_orders() -> None:
    _, search = search_of("1f1b", 6)
    times = TIMES[:6]
    least = min(search.seconds(times, order) for order in permutations(range(6)))
    order = search.best(times, budget_s=0.5)
    assert search.seconds(times, order) <= 1.02 * least


def test_copies_keep_their_micro_batches() -> None:
    _, search = search_of("gpipe", copies=2)
    assert [row.start for row in search._copies] == [0, 4]
    times = [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0]
    _, search = search_of("1f1b", copies=2)
    order = search.best(times)
    assert order is None or (set(order[:4]) == {0, 1, 2, 3} and set(order[4:]) == {4, 5, 6, 7})


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_copies_of_the_same_samples_take_them_in_the_same_order(name: str) -> None:
    """Two copies with one sequence each take as long as one; four in two groups have each group's own order."""
    alone, of_one = search_of(name)
    step = replicate(alone, 2)
    both = OrderSearch(step, CostTable.even(4), 2, 2)
    assert both.seconds(TIMES) == pytest.approx(of_one.seconds(TIMES))
    assert both.best(TIMES, budget_s=None) == of_one.best(TIMES, budget_s=None)
    groups = OrderSearch(replicate(alone, 4), CostTable.even(4), 4, 2)
    order = groups.best([*TIMES, *TIMES], budget_s=None)
    assert order == (*of_one.best(TIMES, budget_s=None), *(8 + i for i in of_one.best(TIMES, budget_s=None)))


def test_without_a_clock_the_best_fixed_order_is_found() -> None:
    _, search = search_of("1f1b")
    order = search.best(TIMES, budget_s=None)
    assert search.seconds(TIMES, order) == min(search.seconds(TIMES, rule(TIMES)) for rule in RULES)


def test_without_time_the_data_has_its_own_order() -> None:
    assert search_of("1f1b")[1].best(TIMES, budget_s=0.0) is None
