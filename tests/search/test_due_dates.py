"""Orders by due dates: what they are for, what they must keep, and those of chains, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.chains import Chains
from raypipe.search.list_scheduling import LaneArrays, list_schedule
from raypipe.search.priorities import PACES, paced, portfolio
from raypipe.search.problem import Problem, build


def uneven(seed: int) -> Problem:
    """Twelve stages that differ by up to a factor of four, three a device anywhere along the model."""
    rng = random.Random(seed)
    row = [0, 1, 2, 3] * 3
    rng.shuffle(row)
    size = [rng.uniform(1, 4) for _ in row]
    f, b, w = (tuple(share * x for x in size) for share in (1.0, 1.1, 0.9))
    costs = CostTable(forward=f, input_grad=b, weight_grad=w, comm=0.1)
    return build((row,), 12, costs, sizes=[(x, x) for x in size], memory_limit=[1.5 * sum(size)] * 4)


@pytest.mark.parametrize("seed", range(3))
def test_a_few_due_dates_do_as_well_as_hundreds_of_other_settings_on_unequal_stages(seed) -> None:
    p = uneven(seed)
    layout = LaneArrays.of(p)
    settings = [s for s in portfolio(p) if s.reserve == "stages"]
    steps = [listed.makespan if (listed := list_schedule(layout, s)) else inf for s in settings]
    few, others = steps[: len(PACES)], steps[len(PACES) :]
    assert len(others) > 800
    assert min(few) < 1.005 * min(others)
    assert min(few) < min(others[:60])


def test_their_orders_keep_the_memory_limit_and_say_when_devices_end() -> None:
    p = uneven(5)
    layout, work = LaneArrays.of(p), max(sum(p.time[c] * p.count[c] for c in own) for own in p.lanes_of)
    for _, setting in zip(PACES, portfolio(p), strict=False):
        listed = list_schedule(layout, setting)
        assert listed is not None
        assert p.fits(listed.orders)
        assert listed.makespan == max(listed.ends)
        assert listed.span == max(listed.spans) >= work


# Quick orders of a chain are as long as those of the problem that ``build`` makes of it, to the last bit.


@pytest.mark.parametrize("seed", range(6))
def test_they_are_the_orders_of_the_problem(seed) -> None:
    rng = random.Random(seed)
    chains, result = Chains(7), 0
    for _ in range(6):
        devices, stages = 3, rng.randint(3, 9)
        row = [0, 1, 2, *(rng.randrange(devices) for _ in range(stages - 3))]
        rng.shuffle(row)
        times = np.array([[rng.choice((1.0, rng.uniform(0, 3))) for _ in range(3)] for _ in row])
        whole = [rng.uniform(1, 2) for _ in row]
        sizes = np.array([(size, rng.choice((size, rng.uniform(0, size)))) for size in whole])
        lag = np.array([rng.choice((0.0, 0.2, 0.7)) for _ in row])
        most = [sum(x for x, d in zip(whole, row, strict=True) if d == own) for own in range(devices)]
        cap = [rng.choice((inf, rng.uniform(1.0, 4.0) * least)) for least in most]
        frozen = rng.choice(((), (), (0,), (0, 2)))
        costs = CostTable(
            forward=tuple(times[:, 0]), input_grad=tuple(times[:, 1]), weight_grad=tuple(times[:, 2]), comm=tuple(lag),
        )  # fmt: skip
        p = build((row,), 7, costs, memory_limit=cap, sizes=list(map(tuple, sizes)), rules=Rules(frozen=frozen))
        layout = LaneArrays.of(p)
        ahead = np.array([[rng.choice((7.0, float(rng.randint(1, 7)))) for _ in row] for _ in PACES])
        ends, spans = chains.ends(np.array(row), times, sizes, lag, np.array(cap), np.array(PACES), ahead, frozen)
        for numbers, limits, end, span in zip(PACES, ahead, ends, spans, strict=True):
            own = tuple(limits[p.stage[c]] if p.kind[c] == "F" else inf for c in range(len(p.kind)))
            listed = list_schedule(layout, replace(paced(layout, numbers), ahead=own))
            result += listed is not None
            if listed is None:
                assert np.isinf(end).all()
            else:
                assert (listed.ends, listed.spans) == (end.tolist(), span.tolist())
    assert result > 30


@pytest.mark.parametrize("in_spans", [False, True])
def test_what_is_given_up_has_a_mean_that_is_of_no_use(in_spans) -> None:
    rng = random.Random(11)
    chains, power, kept, given_up = Chains(6), 20.0, 0, 0
    for _ in range(30):
        row = [0, 1, 2, *(rng.randrange(3) for _ in range(4))]
        times = np.array([[rng.uniform(0.5, 2) for _ in range(3)] for _ in row])
        sizes, lag, cap = np.ones((7, 2)), np.full(7, 0.2), np.array([rng.choice((inf, 8.0)) for _ in range(3)])
        args = (np.array(row), times, sizes, lag, cap, np.array(PACES), np.full((len(PACES), 7), 6.0), ())
        whole = chains.ends(*args)[in_spans]
        means = [float((each**power).mean()) ** (1 / power) for each in whole]
        limit = sorted(means)[len(means) // 2]
        some = chains.ends(*args, limit, power, in_spans)[in_spans]
        for mean, before, after in zip(means, whole.tolist(), some.tolist(), strict=True):
            if after == before:
                kept += 1
            else:
                assert after == [inf] * 3
                assert mean >= limit * (1 - 1e-12)
                given_up += 1
    assert kept > 50
    assert given_up > 50
