"""Distances between packed profiles against a search through all whole-number packings; bounds against CP-SAT."""

import random

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.search.one_device import one_device_bound
from raypipe.search.order_bounds import distances, lower_bound, not_implied
from raypipe.search.problem import build
from tests.search import judge


def by_trying_all(ups, downs, room, k):
    """Least whole distance between the first and the k-th T after it."""

    def held(at):
        return sum(n for up, n in ups if -up <= at) - sum(n for down, n in downs if down <= at)

    reach = max(t for t, _ in ups) + max(t for t, _ in downs)

    def packed(at, far):
        for new in [far] if len(at) == k else range(at[-1], far + 1):
            now = [*at, new]
            fits = all(sum(held(t - a) for a in now) <= room for t in range(new - reach, new + 1))
            if fits and (len(now) > k or packed(now, far)):
                return True
        return False

    return next(far for far in range(k * reach + 1) if packed([0], far))


@pytest.mark.parametrize("seed", range(30))
def test_the_least_distances_of_all_packings(seed):
    rng = random.Random(seed)
    stages = rng.randint(1, 3)
    ups = tuple((float(t), 1.0) for t in sorted((rng.randint(0, 3) for _ in range(stages)), reverse=True))
    downs = tuple((float(rng.randint(1, 4)), 1.0) for _ in range(stages))
    if rng.random() < 0.3:  # an activation that dies in two shares
        downs = tuple((t + more, 0.5) for t, _ in downs for more in (0.0, 1.0))
    room = rng.randint(stages, stages + 2)
    whole = tuple((int(t), n) for t, n in ups), tuple((int(t), n) for t, n in downs)
    result = distances(ups, downs, float(room), 3)
    assert result
    for k, distance in enumerate(result, 1):
        assert distance == pytest.approx(by_trying_all(*whole, room, k))


def test_what_the_ones_before_do_not_imply():
    assert not_implied((0.0, 10.0, 10.0, 20.0, 25.0)) == [(2, 10.0), (5, 25.0)]


@pytest.mark.parametrize("seed", range(12))
def test_never_above_what_is_possible(seed):
    """Two stages a device, hardly any memory: where the distances count."""
    rng = random.Random(seed)
    depth = rng.choice((2, 3))
    down = tuple(range(depth))
    placement = (rng.choice((down * 2, (*down, *reversed(down)))),)
    times = [[rng.randint(1, 9) for _ in range(2 * depth)] for _ in range(3)]
    links, count, memory, split = rng.randint(0, 3), rng.randint(3, 4), rng.randint(2, 4), rng.random() < 0.7
    costs = CostTable(forward=tuple(times[0]), input_grad=tuple(times[1]), weight_grad=tuple(times[2]), comm=links)
    verdict = judge.judge(placement, count, *times, links, memory, split, seconds=5)
    p = build(placement, count, costs, memory_limit=memory, split=split)
    bound = lower_bound(p)
    assert 0.6 * verdict.makespan < bound <= verdict.makespan * (1 + 1e-9)
    tighter = one_device_bound(p, 1.5 * verdict.makespan, 100_000)
    assert 0.8 * verdict.makespan < tighter <= verdict.makespan * (1 + 1e-9)


@pytest.mark.parametrize(("memory", "before", "optimum"), [(4, 405, 505), (6, 353, 406), (8, 341, 372)])
def test_a_v_in_little_memory(memory, before, optimum):
    """Optima by constraint programming; ``before`` is what room for single activations says."""
    placement = ((0, 1, 2, 3, 3, 2, 1, 0),)
    bound = lower_bound(build(placement, 8, CostTable.even(8, 5, 10, 5, comm=2), memory_limit=memory))
    assert before < bound <= optimum
