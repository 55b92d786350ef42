"""Bounds by one device at a time: below optima by CP-SAT, exact where one device is all there is, tight in a V."""

import itertools
import random

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.search import one_device, search
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays
from raypipe.search.one_device import one_device_bound
from raypipe.search.order_bounds import lower_bound
from raypipe.search.order_walk import times
from raypipe.search.problem import build
from tests.exhaustive import exhaustive
from tests.plan.certificate.exact import least_order
from tests.search.judge import judge

V = ((0, 1, 2, 3, 3, 2, 1, 0),)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *exhaustive(8, 16, 24, 32, 40)])
def test_no_order_is_shorter(make_case, first):
    """Every placement, without a memory limit too; the known order is far from the best, and so tells nothing."""
    seen = 0
    for seed in range(first, first + 8):
        case = make_case(seed)
        verdict = judge(
            case.placement, case.count, case.forward, case.input_grad, case.weight_grad, case.latency, case.memory,
            case.split, seconds=5,
        )  # fmt: skip
        p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
        bound = one_device_bound(p, 1.5 * verdict.makespan, 100_000)
        assert bound <= verdict.makespan * (1 + 1e-9), seed
        assert one_device_bound(p, verdict.makespan, 100_000) <= verdict.makespan, seed
        seen += bound > lower_bound(p) * (1 + 1e-9)
    assert seen or first


@pytest.mark.parametrize("seed", range(6))
def test_activations_of_several_sizes(seed):
    """Which the other bounds leave out; against constraint programming."""
    rng = random.Random(seed)
    row = rng.choice(((0, 1, 0), (0, 1, 1, 0), (0, 1, 0, 1)))
    stages, count = len(row), 3
    times = [[rng.randint(1, 9) for _ in row] for _ in range(3)]
    kept, message = [rng.randint(1, 5) for _ in row], rng.randint(0, 3)
    room = rng.randint(0, 3) + max(sum(k for k, d in zip(kept, row, strict=True) if d == own) for own in row)
    best = least_order(range(stages), row, *times, count, message, kept, room, 10**4)
    costs = CostTable(forward=tuple(times[0]), input_grad=tuple(times[1]), weight_grad=tuple(times[2]), comm=message)
    p = build((row,), count, costs, memory_limit=room, sizes=[(float(k), float(k)) for k in kept])
    assert lower_bound(p) * (1 - 1e-9) <= one_device_bound(p, 2.0 * best, 100_000) <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_one_device_alone_is_solved(seed):
    """Every order of the tasks of a line's second device is tried here, too."""
    rng = random.Random(seed)
    times = [tuple(float(rng.randint(1, 9)) for _ in range(3)) for _ in range(3)]
    message = float(rng.randint(0, 9))
    costs = CostTable(forward=times[0], input_grad=times[1], weight_grad=times[2], comm=message)
    memory = rng.choice([1, 2])
    p = build(((0, 1, 2),), 2, costs, memory_limit=[float("inf"), memory, float("inf")])
    s = one_device._Sweeps(p, 1e9, 10**6)
    away = {"F": 0.0, "B": times[0][2] + times[1][2] + 2 * message, "W": 0.0}
    best = float("inf")
    for order in itertools.permutations([(kind, m) for kind in "FBW" for m in range(2)]):
        turn = [order.index((kind, m)) for kind in "FBW" for m in range(2)]
        if any(turn[k] > turn[k + 2] for k in range(4)) or any(turn[k] > turn[k + 1] for k in (0, 2, 4)):
            continue
        if memory == 1 and order.index(("F", 1)) < order.index(("W", 0)):
            continue
        now, makespan, ended = 0.0, 0.0, {}
        for kind, m in order:
            c = next(c for c in p.lanes_of[1] if p.kind[c] == kind)
            before = ended.get(({"B": "F", "W": "B"}.get(kind), m), 0.0)
            now = max(now, s.heads[p.base[c] + m], before + away[kind]) + p.time[c]
            ended[kind, m] = now
            makespan = max(makespan, now + s.tails[p.base[c] + m])
        best = min(best, makespan)
    result, _ = s.swept(1, 1000, False)
    assert result == pytest.approx(best)


def test_the_v_of_the_issue():
    """Four devices, eight micro-batches, messages a fifth of a task, room for four activations: CP-SAT proves 331 in a
    minute, and longest paths say 285."""
    costs = CostTable.even(8, 5, 5, 5, comm=1)
    p = build(V, 8, costs, memory_limit=4)
    assert lower_bound(p) == 285
    assert one_device_bound(p, 338.0, 100_000) == 331
    assert search(V, 8, costs, memory_limit=4, budget=Budget(0.4)).bound >= 330


@pytest.mark.parametrize(("memory", "at_least", "optimum"), [(4, 490, 505), (6, 406, 406), (8, 369, 372)])
def test_a_v_in_little_memory(memory, at_least, optimum):
    """Optima by constraint programming; longest paths say 440, 363 and 348."""
    p = build(V, 8, CostTable.even(8, 5, 10, 5, comm=2), memory_limit=memory)
    assert at_least <= one_device_bound(p, optimum + 1.0, 400_000) <= optimum


def test_a_known_order_that_is_the_best_is_proven_to_be():
    """Without loss: the bound is the order's makespan, not a little less or more."""
    costs = CostTable.even(8, 5.1, 5.2, 4.9, comm=1.03)
    result = search(V, 8, costs, memory_limit=6, budget=Budget(1.0))
    p = build(V, 8, costs, memory_limit=6)
    assert one_device_bound(p, result.value, 400_000) <= result.value
    orders = p.orders(result.schedule)
    assert orders is not None
    begin, end, _ = times(LaneArrays.of(p), orders)
    s = one_device._Sweeps(p, 2 * result.value, 400_000)
    for d in range(4):  # heads and tails hold for this order's own times
        s.look_at(d, 4)
    for t in range(p.tasks):
        assert s.heads[t] <= begin[t] + 1e-6
        assert s.tails[t] <= result.value - end[t] + 1e-6
