"""Walks keep what an order has to, times equal those of the simulator, and memory is what the IR counts."""

import random

import numpy as np
import pytest

from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.verify import verify
from raypipe.search import order_kernel as kernel
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, list_schedule
from raypipe.search.order_walk import Frame, kernel_order, seed_of, shortened, times
from raypipe.search.priorities import portfolio, shaken
from raypipe.search.problem import build
from raypipe.simulate.engine import simulate


def been_to(case, seed):
    """The orders at every fifth step of a walk so hot that it goes wherever an order can run."""
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout, random_numbers = LaneArrays.of(p), seed_of(random.Random(seed))
    setting = kernel_order(layout, list_schedule(layout, next(portfolio(p))).orders, None)
    best, result = setting.order.copy(), []
    for _ in range(30):
        value = kernel.walk(*setting, best, np.inf, 0.0, 1e3, 1e3, 5, random_numbers)
        result.append(layout.orders(setting.order, setting.places))
        assert value <= max(times(layout, result[-1]).end) * (1 + 1e-9)
    return layout, result


def test_wherever_a_walk_comes_the_step_runs_in_its_memory(make_case):
    moved = 0
    for seed in range(24):
        case = make_case(seed)
        layout, been = been_to(case, seed)
        p = layout.problem
        for orders in been:
            schedule = p.schedule(orders)
            verify(schedule, case.memory)
            assert p.orders(schedule) == orders
            begin, end, in_turn = times(layout, orders)
            assert simulate(schedule, case.costs).makespan == pytest.approx(max(end))
            place = {t: k for k, t in enumerate(in_turn)}
            for t, c in enumerate(p.lane):
                waits = [p.base[e] + t - p.base[c] for e, _ in p.before[c]]
                assert all(place[q] < place[t] and end[q] <= begin[t] + 1e-9 for q in waits)
            assert p.peaks(orders) == pytest.approx(peak_activations(schedule))
        moved += been[0] != been[-1]
    assert moved >= 12


@pytest.mark.parametrize("seed", range(12))
def test_the_best_order_of_a_walk_is_as_long_as_it_says(make_case, seed):
    case = make_case(seed)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout, rng = LaneArrays.of(p), random.Random(seed)
    start = next(listed.orders for s in reversed(list(portfolio(p))) if (listed := list_schedule(layout, s)))
    due = [rng.uniform(-3, 3) for _ in range(p.devices)]
    for frame in (None, Frame([0.0] * p.devices, due)):
        orders, value = shortened(layout, start, 0.0, Budget(60), rng, 500, frame)
        plus = [0.0] * p.devices if frame is None else due

        def of(orders, plus=plus):
            return max(times(layout, orders).end[order[-1]] + plus[d] for d, order in enumerate(orders))

        assert value == pytest.approx(of(orders))
        assert value <= of(start) * (1 + 1e-9)
        verify(p.schedule(orders), case.memory)


@pytest.mark.parametrize("seed", range(20))
def test_list_schedules_run_and_are_as_long_as_they_say(make_case, seed):
    case = make_case(seed)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout, rng = LaneArrays.of(p), random.Random(seed)
    settings = list(portfolio(p))
    ran = 0
    for setting in rng.sample(settings, 6):
        listed = list_schedule(layout, shaken(p, setting, rng))
        if listed is None:
            continue
        ran += 1
        schedule = p.schedule(listed.orders)
        verify(schedule, case.memory)
        timeline = simulate(schedule, case.costs)
        assert (timeline.makespan, max(timeline.device_spans)) == pytest.approx((listed.makespan, listed.span))
        assert p.orders(schedule) == listed.orders
        assert p.fits(listed.orders)
        if case.memory is not None:
            assert max(peak_activations(schedule)) <= case.memory
    assert ran > 0


@pytest.mark.slow
def test_with_reserves_nothing_jams(make_case):
    """Every setting that keeps them ends, however small the memory."""
    for seed in range(60):
        case = make_case(seed)
        p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
        layout = LaneArrays.of(p)
        assert all(list_schedule(layout, s) is not None for s in list(portfolio(p))[::7] if s.reserve == "stages")


def test_a_walk_ends_at_its_goal_its_budget_or_its_tries(make_case):
    case = make_case(5)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout = LaneArrays.of(p)
    start = list_schedule(layout, next(portfolio(p)))
    orders, value = shortened(layout, start.orders, 0.0, Budget(60), random.Random(0), 3000)
    assert value <= start.makespan
    assert shortened(layout, orders, value, Budget(60), random.Random(0), 10**12) == (orders, value)
    long = shortened(layout, start.orders, 0.0, Budget(0.05), random.Random(0), 10**12)
    assert value <= long[1] * 1.5
