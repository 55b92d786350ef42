"""Quick orders of a chain are as long as those of the problem that ``build`` makes of it, to the last bit."""

import random
from math import inf

import numpy as np
import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.search.lists.chains import Chains
from raypipe.search.lists.list_scheduling import Layout, list_schedule
from raypipe.search.lists.priorities import PACES, paced
from raypipe.search.problem import build


@pytest.mark.parametrize("seed", range(6))
def test_they_are_the_orders_of_the_problem(seed) -> None:
    rng = random.Random(seed)
    chains, found = Chains(7), 0
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
        zeros = (0.0,) * stages
        costs = CostTable(
            forward=tuple(times[:, 0]), input_grad=tuple(times[:, 1]), weight_grad=tuple(times[:, 2]), recompute=zeros,
            all_reduce=zeros, update=zeros, comm=tuple(lag),
        )  # fmt: skip
        p = build((row,), 7, costs, memory_limit=cap, sizes=list(map(tuple, sizes)), rules=Rules(frozen=frozen))
        layout = Layout.of(p)
        ends, spans = chains.ends(np.array(row), times, sizes, lag, np.array(cap), np.array(PACES), frozen)
        for numbers, end, span in zip(PACES, ends, spans, strict=True):
            listed = list_schedule(layout, paced(layout, numbers))
            found += listed is not None
            if listed is None:
                assert np.isinf(end).all()
            else:
                assert (listed.ends, listed.spans) == (end.tolist(), span.tolist())
    assert found > 30
