"""Times kept up to date through moves equal those of the simulator, and memory is what the IR counts."""

import random

import pytest

from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.verify import verify
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, list_schedule
from raypipe.search.priorities import portfolio, shaken
from raypipe.search.problem import build
from raypipe.search.tabu import _kick, improve
from raypipe.search.timed_order import Move, TimedOrder
from raypipe.simulate.engine import simulate


@pytest.mark.parametrize("seed", range(12))
def test_moves_keep_times_links_and_memory(make_case, seed):
    case = make_case(seed)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    rng = random.Random(seed)
    listed = list_schedule(LaneArrays.of(p), next(portfolio(p)))
    state = TimedOrder(p)
    state.load(listed.orders)
    for _ in range(40):
        _kick(state, rng, 1e-9)
        orders = state.orders()
        fresh = TimedOrder(p)
        fresh.load(orders)
        assert fresh.end == pytest.approx(state.end)
        assert fresh.rest == pytest.approx(state.rest)
        assert fresh.live == state.live
        place = {t: k for k, t in enumerate(state.topological)}
        assert all(place[q] < place[t] for t in range(p.tasks) for q, _ in state.before[t])
    schedule = p.schedule(orders)
    verify(schedule, case.memory)
    assert simulate(schedule, case.costs).makespan == pytest.approx(state.makespan)
    assert p.peaks(orders) == pytest.approx(peak_activations(schedule))


def test_a_move_that_closes_a_circle_changes_nothing(make_case):
    case = make_case(0)
    p = build(case.placement, case.count, case.costs)
    state = TimedOrder(p)
    state.load(list_schedule(LaneArrays.of(p), next(portfolio(p))).orders)
    before = (state.orders(), list(state.end), list(state.topological))
    refused = 0
    for order in state.orders():
        for k in range(1, len(order)):
            for j in range(k):
                move = Move.single(order[k], order[j:k], True)
                if not state.apply(move):
                    refused += 1
                    assert (state.orders(), state.end, state.topological) == before
                else:
                    state.load(before[0])
                    before = (state.orders(), list(state.end), list(state.topological))
    assert refused > 0


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


def test_improve_ends_at_its_goal_or_its_moves(make_case):
    case = make_case(5)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    start = list_schedule(LaneArrays.of(p), next(portfolio(p)))
    orders, value = improve(p, start.orders, 0.0, Budget(60), random.Random(0), 50)
    assert value <= start.makespan
    assert improve(p, orders, value, Budget(60), random.Random(0), 50) == (orders, value)
