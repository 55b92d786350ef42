"""Orders made from wishes, and the check that they cannot jam, against a search through all states."""

import random

import numpy as np
import pytest

from raypipe.schedule.verify import verify
from raypipe.search.list_kernel import safe
from raypipe.search.list_scheduling import LaneArrays, decode, disturbed, list_schedule
from raypipe.search.order_walk import times
from raypipe.search.priorities import portfolio
from raypipe.search.problem import build


@pytest.mark.parametrize("seed", range(24))
def test_every_disturbed_order_runs_in_its_memory(make_case, seed):
    case = make_case(seed)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout, rng = LaneArrays.of(p), random.Random(seed)
    orders = list_schedule(layout, next(portfolio(p))).orders
    for patience in (0.0, 1.0, 5.0, float("inf")):
        begin, end, _ = times(layout, orders)
        wish = disturbed(layout, begin, max(end), rng)
        made = decode(layout, wish, patience)
        if made is not None:
            orders = made
            verify(p.schedule(orders), case.memory)
            assert p.fits(orders)


@pytest.mark.parametrize("seed", range(12))
def test_an_order_is_made_from_its_own_starts(make_case, seed):
    """A device that waits for whatever should come first keeps every order it is given."""
    case = make_case(seed)
    p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    layout = LaneArrays.of(p)
    orders = list_schedule(layout, next(portfolio(p))).orders
    wish = [float(k) for _, k in sorted((t, k) for k, t in enumerate(times(layout, orders).in_turn))]
    assert decode(layout, wish, 0.0) == orders


def can_end(p, done, last):
    """Can the first ``last[replica]`` micro-batches of each replica end, none other being begun? By trying all."""
    seen, todo = {tuple(done)}, [tuple(done)]
    while todo:
        state = todo.pop()
        held = [0.0] * p.devices
        for c, k in enumerate(state):
            held[p.device[c]] += k * (p.takes[c] - p.frees[c])
        if all(state[c] >= last[p.replica[c]] for c in range(len(state))):
            return True
        for c, k in enumerate(state):
            ready = k < last[p.replica[c]] and all(state[e] > k for e, _ in p.before[c])
            if ready and held[p.device[c]] + p.takes[c] <= p.cap[p.device[c]] + 1e-9:
                after = (*state[:c], k + 1, *state[c + 1 :])
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return False


@pytest.mark.parametrize("placement", [((0, 1, 1, 0),), ((0, 1, 0, 1),), ((0, 1), (1, 0)), ((0, 0, 0),)])
@pytest.mark.parametrize("memory", [2, 3])
@pytest.mark.parametrize("recompute", [(), (0,)])
def test_safe_states_are_those_from_which_all_can_end(make_case, placement, memory, recompute):
    from raypipe.schedule.costs import CostTable

    costs = CostTable.even(len(placement[0]), recompute=1)
    if memory < max(placement[0].count(d) for d in placement[0]):
        memory = 3
    p = build(placement, 5, costs, memory_limit=memory, recompute=recompute)
    flat, rng = LaneArrays.of(p).flat, random.Random(memory)
    told = {True: 0, False: 0}
    for _ in range(60):
        done, live = [0] * len(p.kind), [0.0] * p.devices
        for _ in range(rng.randrange(1, 14)):
            ready = [
                c for c, k in enumerate(done)
                if k < p.count[c] and all(done[e] > k for e, _ in p.before[c])
                and live[p.device[c]] + p.takes[c] <= p.cap[p.device[c]]
            ]  # fmt: skip
            if ready:
                c = rng.choice(ready)
                done[c] += 1
                live[p.device[c]] += p.takes[c] - p.frees[c]
        begun = [
            max(k for c, k in enumerate(done) if p.replica[c] == r and p.kind[c] == "F") for r in range(len(placement))
        ]  # fmt: skip
        said = safe(flat, np.array(done), np.array(live))
        told[said] += 1
        if said:
            assert can_end(p, done, begun)
        elif not recompute:  # what a rebuilt activation needs is counted on the safe side
            assert not can_end(p, done, begun)
    assert told[True] > 0
