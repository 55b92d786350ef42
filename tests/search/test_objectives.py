"""Span and period against every order there is of tiny steps, and against published figures."""

import itertools
import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.live_activations import peak_activations
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period


def words(lanes, count):
    """All orders of a device's lanes (kind, stage, replica), each lane in turn and W after B after F of a stage."""
    if all(count[lane] == 0 for lane in lanes):
        yield ()
        return
    for lane in lanes:
        kind, stage, replica = lane
        before = {"F": None, "B": "F", "BW": "F", "W": "B"}[kind]
        if count[lane] and (before is None or count[before, stage, replica] < count[lane]):
            rest = {**count, lane: count[lane] - 1}
            for more in words(lanes, rest):
                yield (lane, *more)


def every_order(placement, microbatches, split):
    """Every step of this placement; micro-batches go to the replicas in turn."""
    replicas = len(placement)
    kinds = ("F", "B", "W") if split else ("F", "BW")
    share = [len(range(r, microbatches, replicas)) for r in range(replicas)]
    rows = []
    for d in range(1 + max(max(row) for row in placement)):
        lanes = [(k, s, r) for r, row in enumerate(placement) for s, at in enumerate(row) if at == d for k in kinds]
        made = []
        for word in words(lanes, {lane: share[lane[2]] for lane in lanes}):
            seen = dict.fromkeys(lanes, 0)
            order = []
            for kind, stage, replica in word:
                m = seen[kind, stage, replica]
                seen[kind, stage, replica] = m + 1
                order.append(Task(kind, stage, (m * replicas + replica,), replica))
            made.append(tuple(order))
        rows.append(made)
    for orders in itertools.product(*rows):
        yield Schedule(
            name="any", placement=placement, orders=orders, microbatches=microbatches,
            graph=StageGraph.chain(len(placement[0])),
        )  # fmt: skip


TINY = [
    (((0, 1),), 3, True, None),
    (((0, 1),), 3, True, 2),
    (((0, 1, 2),), 2, True, None),
    (((0, 1, 1, 0),), 1, True, None),
    (((0, 1, 0, 1),), 1, True, None),
    (((0, 1, 1, 0),), 2, False, 2),
    (((0, 1), (1, 0)), 3, False, None),
    (((0, 1), (1, 0)), 3, False, 2),
]
"""Placement, micro-batches, whether the backward is split, memory."""


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(TINY)))
@pytest.mark.parametrize("objective", ["span", "period"])
def test_the_least_of_all_orders(case, objective):
    placement, count, split, memory = TINY[case]
    rng = random.Random(case)
    stages = len(placement[0])
    times = [tuple(float(rng.randint(1, 9)) for _ in range(stages)) for _ in range(3)]
    costs = CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2],
        comm=tuple(float(rng.randint(0, 4)) for _ in range(stages)),
    )  # fmt: skip
    best, tried = float("inf"), 0
    for schedule in every_order(placement, count, split):
        if memory is not None and max(peak_activations(schedule)) > memory:
            continue
        try:
            timeline = simulate(schedule, costs)
        except ScheduleError:  # the devices wait for each other
            continue
        tried += 1
        if objective == "span":
            best = min(best, max(timeline.device_spans))
        elif best > max(timeline.busy):  # no period is less
            best = min(best, period(schedule, costs))
    assert tried > 1
    result = search(
        placement, count, costs, memory_limit=memory, split=split, objective=objective, budget=Budget(5.0), enough=best,
    )  # fmt: skip
    timeline = simulate(result.schedule, costs)
    value = max(timeline.device_spans) if objective == "span" else period(result.schedule, costs)
    assert result.value == pytest.approx(value)
    assert result.bound <= best * (1 + 1e-9)
    assert result.value == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "count", "times", "limits"),
    [
        (4, 16, (10, 11, 8, 1), (515, 473)), (8, 32, (10, 11, 8, 1), (1047, 939)),
        (8, 64, (10, 11, 8, 1), (1975, 1867)), (16, 64, (10, 11, 8, 1), (2111, 1891)),
        (8, 24, (10, 10, 10, 0), (790, 720)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("objective", ["span", "period"])
def test_the_public_heuristics_spans(depth, count, times, limits, objective):
    """What the zero-bubble authors' own code finds in 1F1B's memory and in twice as much, B freeing half."""
    f, b, w, c = times
    costs = CostTable.even(depth, f, b, w, comm=c)
    for factor, limit in zip((1, 2), limits, strict=True):
        result = search(
            (tuple(range(depth)),), count, costs, memory_limit=factor * depth, freed_by_b=0.5, objective=objective,
            enough=limit,
        )  # fmt: skip
        assert result.value <= limit
