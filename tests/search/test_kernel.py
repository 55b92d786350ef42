"""The kernels build the same orders as plain Python, to the last bit."""

import random
from math import inf

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.list_scheduling import LaneArrays, decode, list_schedule
from raypipe.search.priorities import portfolio, shaken
from raypipe.search.problem import Problem, build
from tests.search import in_python as python
from tests.search.test_due_dates import uneven


def recomputing(seed: int) -> Problem:
    """Stages that recompute, are frozen or take no time, among others."""
    rng = random.Random(seed)
    row = (*(rng.randrange(3) for _ in range(5)), 0, 1, 2)
    times = [tuple(rng.choice((0.0, 1.0, 2.0, 3.5)) for _ in row) for _ in range(3)]
    zeros = (0.0,) * len(row)
    costs = CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=times[0], all_reduce=zeros,
        update=zeros, comm=rng.choice((0.0, 0.5)),
    )  # fmt: skip
    dropped = tuple(s for s in range(2, len(row)) if rng.random() < 0.3)
    frozen = Rules(frozen=rng.choice(((), (0,), (0, 1))))
    return build((row,), 6, costs, memory_limit=6, recompute=dropped, rules=frozen, split=rng.random() < 0.7)


def problems(make_case, seed):
    case = make_case(seed)
    yield build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    yield recomputing(seed)
    yield uneven(seed)


@pytest.mark.parametrize("seed", range(8))
def test_kernels_do_what_plain_python_does(make_case, seed) -> None:
    rng, jams = random.Random(seed), 0
    for p in problems(make_case, seed):
        layout, tables = LaneArrays.of(p), python.Tables.of(p)
        settings = list(portfolio(p))
        for setting in rng.sample(settings, 4) + [s for s in settings if s.reserve == "safe"][:1]:
            changed = shaken(p, setting, rng)
            listed = list_schedule(layout, changed)
            assert listed == python.list_schedule(tables, changed)
            jams += listed is None
        listed = next(found for s in settings if (found := list_schedule(layout, s)) is not None)
        far = 0.2 * listed.makespan
        for patience in (0.0, 0.1 * far, inf):
            wish = [0.0] * p.tasks
            for order in listed.orders:
                for k, t in enumerate(order):
                    wish[t] = k * far / 10 + rng.uniform(0, far)
            for c, k in enumerate(p.count):
                wish[p.base[c] : p.base[c] + k] = sorted(wish[p.base[c] : p.base[c] + k])
            assert decode(layout, wish, patience) == python.decode(tables, wish, patience)
