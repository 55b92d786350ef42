"""Links of different latency, against a second, slow way to time a schedule with its own rule.

``starts`` knows nothing of ``raypipe``'s dependency rule or of its walks: it writes every precedence down as an edge
and relaxes starts until none moves (longest paths by brute force), one step or many.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.live_activations import unroll
from raypipe.schedule.passes import split_backward
from raypipe.search import search
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period
from raypipe.simulate.timeline import critical_path

Key = tuple[int, Task]
"""(training step, task)."""


def link_time(links: tuple[float, ...], a: int, b: int) -> float:
    """Neighbours: the link between them. Others: the slowest of the links between them."""
    return 0.0 if a == b else max(links[s] for s in range(min(a, b), max(a, b)))


def starts(schedule: Schedule, costs: CostTable, links: tuple[float, ...], steps: int = 1) -> dict[Key, float]:
    """Start of every task of ``steps`` steps that follow one another without a barrier."""
    length = {t: costs.durations(schedule, [t])[0] for t in schedule.tasks()}
    made: dict[tuple[str, int, int], Task] = {}
    for t in schedule.tasks():
        made.update({(k, t.stage, m): t for m in t.mbs for k in (("B", "W") if t.kind == "BW" else (t.kind,))})
    one: list[tuple[Task, Task]] = []
    for t in schedule.tasks():
        for m in t.mbs:
            wants = [("F", a, m) for a, b in schedule.graph.edges if b == t.stage and t.kind == "F"]
            if t.kind in ("B", "BW"):
                wants += [("F", t.stage, m), *(("B", b, m) for a, b in schedule.graph.edges if a == t.stage)]
            if t.kind == "W" and schedule.rules.w_dep == "grad":
                wants += [("F", t.stage, m), *(("B", b, m) for a, b in schedule.graph.edges if a == t.stage)]
            elif t.kind == "W":
                wants.append(("B", t.stage, m))
            one += [(made[want], t) for want in wants]
    edges: list[tuple[Key, Key, float]] = []
    at = {(r, s): d for r, row in enumerate(schedule.placement) for s, d in enumerate(row)}
    for k in range(steps):
        for p, t in one:
            far = at[p.replica, p.stage] != at[t.replica, t.stage]
            edges.append(((k, p), (k, t), length[p] + (link_time(links, p.stage, t.stage) if far else 0.0)))
        for order in schedule.orders:
            edges += [((k, p), (k, t), length[p]) for p, t in itertools.pairwise(order)]
            if k and order:
                edges.append(((k - 1, order[-1]), (k, order[0]), length[order[-1]]))
        if k:  # a stage's weights are new when every gradient of it is there
            for t in schedule.tasks():
                if t.kind == "F":
                    edges += [
                        ((k - 1, p), (k, t), length[p])
                        for p in schedule.tasks() if p.stage == t.stage and p.kind in ("W", "BW")
                    ]  # fmt: skip
    found = {(k, t): 0.0 for k in range(steps) for t in schedule.tasks()}
    moved = True
    while moved:
        moved = False
        for p, t, time in edges:
            if found[p] + time > found[t]:
                found[t], moved = found[p] + time, True
    return found


def random_costs(rng: random.Random, stages: int, links: tuple[float, ...]) -> CostTable:
    times = [tuple(float(rng.randint(1, 9)) for _ in range(stages)) for _ in range(3)]
    zeros = (0.0,) * stages
    return CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=zeros, all_reduce=zeros, update=zeros,
        comm=links,
    )  # fmt: skip


SHAPES = [
    ("1f1b", {"devices": 4}), ("gpipe", {"devices": 3}), ("zb-h1", {"devices": 3}), ("zb-v", {"devices": 3}),
    ("interleaved-1f1b", {"devices": 3, "chunks": 2}), ("modulo", {"devices": 2, "chunks": 3}),
    ("chimera", {"devices": 4}), ("chimera", {"devices": 4, "concat": "doubling"}),
    ("chimera", {"devices": 4, "pipelines": 4}), ("gems", {"devices": 4}),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(SHAPES), count=st.integers(1, 5), short=st.booleans(), seed=st.integers(0, 999))
def test_makespan_and_every_start(case: tuple[str, dict], count: int, short: bool, seed: int) -> None:
    name, options = case
    rng = random.Random(seed)
    shape = Shape(microbatches=count, **options)
    stages = stages_of(name, shape)
    links = tuple(float(rng.randint(0, 6)) for _ in range(stages))
    costs = random_costs(rng, stages, links[:-1] if short else links)
    schedule = generate(name, shape, costs)
    if any(t.kind == "R" for t in schedule.tasks()):
        schedule = schedule.with_orders([t for t in order if t.kind != "R"] for order in schedule.orders)
    if rng.random() < 0.5:
        schedule = split_backward(schedule)
    expected = starts(schedule, costs, links)
    timeline = simulate(schedule, costs)
    assert {(0, s.task): s.start for row in timeline.spans for s in row} == expected
    assert lower_bound(schedule, costs) <= timeline.makespan * (1 + 1e-12)
    path = critical_path(timeline).spans
    device = {s.task: d for d, row in enumerate(timeline.spans) for s in row}
    gaps = [
        link_time(links, a.task.stage, b.task.stage) if device[a.task] != device[b.task] else 0.0
        for a, b in itertools.pairwise(path)
    ]
    assert [b.start - a.end for a, b in itertools.pairwise(path)] == gaps
    assert path[0].start == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(case=st.sampled_from(SHAPES), count=st.integers(2, 4), seed=st.integers(0, 999))
def test_period(case: tuple[str, dict], count: int, seed: int) -> None:
    name, options = case
    rng = random.Random(seed)
    shape = Shape(microbatches=count, **options)
    stages = stages_of(name, shape)
    links = tuple(float(rng.randint(0, 6)) for _ in range(stages))
    costs = random_costs(rng, stages, links)
    schedule = generate(name, shape, costs)
    schedule = schedule.with_orders([t for t in order if t.kind != "R"] for order in schedule.orders)
    steps = 24  # a cycle through several steps may alternate; 12 is a multiple of the short ones
    late = starts(schedule, costs, links, steps)
    last = [max(late[k, order[-1]] for order in schedule.orders if order) for k in (steps // 2 - 1, steps - 1)]
    assert period(schedule, costs) == pytest.approx((last[1] - last[0]) / (steps // 2), rel=0.02)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize("links", [(0.0, 5.0, 1.0), (4.0, 0.0, 3.0), (9.0, 9.0, 0.5)])
def test_period_of_an_endless_order(name: str, links: tuple[float, ...]) -> None:
    costs = random_costs(random.Random(5), 4, links)
    schedule = generate(name, Shape(devices=4, microbatches=4), costs)
    ends = []
    for steps in (12, 24):
        many = unroll(schedule, steps)
        ends.append(max(t for t in starts(many, costs, (*links, 0.0)).values()))
    assert period(schedule, costs) == pytest.approx((ends[1] - ends[0]) / 12, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_a_skip_connection_is_as_slow_as_the_slowest_link_it_crosses(seed: int) -> None:
    rng = random.Random(seed)
    graph = StageGraph(5, ((0, 1), (1, 2), (0, 3), (2, 3), (1, 4), (3, 4)))
    links = tuple(float(rng.randint(0, 8)) for _ in range(5))
    costs = random_costs(rng, 5, links)
    found = search(((0, 1, 2, 1, 0),), 3, costs, graph=graph, budget_s=0.05)
    expected = starts(found.schedule, costs, links)
    timeline = simulate(found.schedule, costs)
    assert {(0, s.task): s.start for row in timeline.spans for s in row} == expected
    assert found.bound <= found.value == timeline.makespan


def test_latencies_are_normalised() -> None:
    assert CostTable.even(4, comm=(1.0, 2.0, 3.0)).links == (1, 2, 3, 3)
    assert CostTable.even(4, comm=(2.0, 2.0, 2.0)) == CostTable.even(4, comm=2.0)
    assert CostTable.even(1, comm=()).comm == 0
    for wrong in ((1.0,), (1.0,) * 5, (1.0, float("inf"), 0.0)):
        with pytest.raises(ScheduleError, match="comm"):
            CostTable.even(4, comm=wrong)
