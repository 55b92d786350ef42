"""Random schedules stay valid under random passes, and random damage is refused.

The random ones have any shape, any DAG of stages and any order that respects the dependency rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import dependencies
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task, backwards
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.live_activations import peak_activations, unroll
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    fuse_backward,
    insert_weights,
    place_gradient_sync,
    replicate,
    split_backward,
)
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period
from raypipe.simulate.timeline import critical_path

COSTS = functools.partial(CostTable.even, comm=0.5)
Pass = Callable[[Schedule], Schedule]
PASSES: dict[str, Pass] = {
    "split": split_backward,
    "fuse": fuse_backward,
    "fuse everywhere": lambda s: fuse_backward(s, everywhere=True),
    "recompute": add_recompute,
    "recompute early, first stage": lambda s: add_recompute(s, "early", [0]),
    "recompute none": lambda s: add_recompute(s, stages=[]),
    "replicate": lambda s: replicate(s, 2) if s.replicas < 4 else s,
    "lazy": lambda s: place_gradient_sync(s, "lazy"),
    "eager": lambda s: place_gradient_sync(s, "eager"),
    "eager-opt": lambda s: place_gradient_sync(s, "eager-opt"),
    "updates": add_updates,
    "weights": lambda s: s if {"AR", "U"} & {t.kind for t in s.tasks()} else insert_weights(s, COSTS(s.stages)),
}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to 3 devices, 5 stages, 4 ids in slices or not, 3 replicas placed anywhere, split or joint, recompute."""
    devices, stages = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    count, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    placement = [[draw(st.integers(0, devices - 1)) for _ in range(stages)] for _ in range(replicas)]
    skips = draw(st.sets(st.tuples(st.integers(0, stages), st.integers(0, stages)), max_size=2))
    chain = {(s, s + 1) for s in range(stages - 1)}
    edges = sorted(chain | {(a, b) for a, b in skips if a < b < stages})
    graph = StageGraph(stages, tuple(edges))
    slices = draw(st.sampled_from([k for k in (1, 2, 4) if count % k == 0]))
    rules = Rules(
        recompute=draw(st.sampled_from(["early", "late"])), w_dep=draw(st.sampled_from(["B", "grad"])), slices=slices
    )
    owners = [draw(st.integers(0, replicas - 1)) for _ in range(count // slices)]
    owner = [replica for replica in owners for _ in range(slices)]

    todo: dict[Task, list[tuple[tuple[str, ...], int, int]]] = {}
    inputs, outputs, needs_of = graph.inputs(), graph.outputs(), backwards(graph, rules)
    for m in range(count):
        for s in range(stages):
            again = draw(st.booleans())
            kinds = ["F", *(["B", "W"] if draw(st.booleans()) else ["BW"]), *(["R"] if again else [])]
            for kind in kinds:
                needs = dependencies(kind, s, inputs[s], outputs[s], again, rules, needs_of[s])  # type: ignore[arg-type]
                todo[Task(kind, s, (m,), owner[m])] = [
                    (k, stage, at) for k, stage, along in needs if (at := rules.neighbour(m, along)) is not None
                ]  # fmt: skip
    orders: list[list[Task]] = [[] for _ in range(devices)]
    done: set[tuple[str, int, int]] = set()
    while todo:
        ready = [t for t, needs in todo.items() if all(any((k, s, m) in done for k in ks) for ks, s, m in needs)]
        task = draw(st.sampled_from(ready))
        del todo[task]
        done.add((task.kind, task.stage, task.mbs[0]))
        orders[placement[task.replica][task.stage]].append(task)
    return Schedule(
        name="random", placement=tuple(map(tuple, placement)), orders=tuple(map(tuple, orders)), microbatches=count,
        graph=graph, rules=rules, size=Fraction(1, slices),
    )  # fmt: skip


def costs(schedule: Schedule, scale: float = 1.0) -> CostTable:
    n = range(schedule.stages)
    return CostTable(
        forward=tuple(scale * (1 + s) for s in n), input_grad=tuple(scale * (2 + s % 3) for s in n),
        weight_grad=tuple(scale for _ in n), recompute=tuple(scale for _ in n), all_reduce=tuple(scale * 3 for _ in n),
        update=tuple(scale for _ in n), comm=scale * 0.5,
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(schedules(), st.lists(st.sampled_from(sorted(PASSES)), max_size=5))
def test_passes_keep_a_schedule_valid(schedule: Schedule, names: list[str]) -> None:
    verify(schedule)
    for name in names:
        schedule = PASSES[name](schedule)
        verify(schedule)
    once, twice = simulate(schedule, costs(schedule)), simulate(schedule, costs(schedule, 2))
    assert twice.makespan == pytest.approx(2 * once.makespan)
    for row in once.spans:
        lane = [s for s in row if s.task.kind != "AR"]
        assert all(a.end <= b.start for a, b in itertools.pairwise(lane))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedules())
def test_split_and_fuse_move_nothing_later(schedule: Schedule) -> None:
    split = split_backward(schedule)
    assert not any(t.kind == "BW" for t in split.tasks())
    assert simulate(split, costs(schedule)).makespan <= simulate(schedule, costs(schedule)).makespan
    fused = fuse_backward(split, everywhere=True)
    if schedule.rules.w_dep == "B":
        assert {t.kind for t in fused.tasks()} <= {"F", "BW", "R"}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(2, 3))
def test_copies_do_not_touch_each_other(schedule: Schedule, copies: int) -> None:
    many = replicate(schedule, copies)
    verify(many)
    assert simulate(many, costs(schedule)).makespan == simulate(schedule, costs(schedule)).makespan
    assert peak_activations(many) == peak_activations(schedule) * copies


@settings(max_examples=60, deadline=None)
@given(schedules(), st.sampled_from(["lazy", "eager", "eager-opt"]))
def test_no_policy_is_slower_than_lazy(schedule: Schedule, policy: str) -> None:
    table = costs(schedule)
    lazy = add_updates(place_gradient_sync(schedule, "lazy", table))
    other = add_updates(place_gradient_sync(schedule, policy, table))  # type: ignore[arg-type]
    assert simulate(other, table).makespan <= simulate(lazy, table).makespan


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_damage_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    device = data.draw(st.sampled_from([d for d, o in enumerate(schedule.orders) if o]))
    order = list(schedule.orders[device])
    k = data.draw(st.integers(0, len(order) - 1))
    task = order[k]
    damage = data.draw(st.sampled_from(["drop", "double", "stage", "micro-batch", "replica"]))
    if damage == "drop":
        if task.kind == "R":
            return  # a step without it is complete: the activation is simply kept
        del order[k]
    elif damage == "double":
        order.insert(k, task)
    elif damage == "stage":
        order[k] = task._replace(stage=task.stage + schedule.stages)
    elif damage == "micro-batch":
        order[k] = task._replace(mbs=(task.mbs[0] - schedule.microbatches,))
    else:
        order[k] = task._replace(replica=-1)
    orders = [*schedule.orders[:device], tuple(order), *schedule.orders[device + 1 :]]
    with pytest.raises(ScheduleError):
        verify(schedule.with_orders(orders))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_any_order_runs_or_is_refused_alike(schedule: Schedule, data: st.DataObject) -> None:
    """Shuffled orders: the verifier and the simulator agree, since both ask one rule."""
    shuffled = schedule.with_orders([data.draw(st.permutations(o)) for o in schedule.orders])
    answers = []
    for ask in (verify, lambda s: simulate(s, costs(s))):
        try:
            ask(shuffled)
            answers.append("runs")
        except ScheduleError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    if answers[0] != "runs":
        assert "<-- here" in answers[0]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(schedules())
def test_peak_activations_agree_with_times(schedule: Schedule) -> None:
    """Counted from the order alone, as from the spans of a run (all tasks take time)."""
    timeline = simulate(schedule, costs(schedule))
    again = {(t.stage, t.mbs[0]) for t in schedule.tasks() if t.kind == "R"}
    for row, peak in zip(timeline.spans, timeline.peak_activations, strict=True):
        events = []
        for span in row:
            where = (span.task.stage, span.task.mbs[0])
            if span.task.kind == ("R" if where in again else "F"):
                events.append((span.start, 1))
            elif span.task.kind in ("W", "BW"):
                events.append((span.end, -1))
        alive = most = 0
        for _, change in sorted(events):
            alive += change
            most = max(most, alive)
        assert most * schedule.size == peak
    assert all(t.kind in COMPUTE for t in schedule.tasks())


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_bounds_of_any_order(schedule: Schedule) -> None:
    """Bound <= makespan, busiest device <= period <= makespan, and a critical path without a gap."""
    table = replace(costs(schedule), comm=tuple(1.5 * (s % 3) for s in range(schedule.stages)))
    timeline = simulate(schedule, table)
    assert lower_bound(schedule, table) <= timeline.makespan + 1e-9
    assert max(timeline.busy) - 1e-9 <= period(schedule, table) <= timeline.makespan + 1e-9
    path = critical_path(timeline).spans
    assert (path[0].start, path[-1].end) == (0, timeline.makespan)
    device = {s.task: d for d, row in enumerate(timeline.spans) for s in row}
    for a, b in itertools.pairwise(path):  # a message takes what the slowest link takes that it crosses
        low, high = sorted((a.task.stage, b.task.stage))
        crossed = table.links[low:high] if device[a.task] != device[b.task] else ()
        assert b.start - a.end == max(crossed, default=0.0)


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(1, 3))
def test_steps_in_a_row_are_a_valid_step(schedule: Schedule, steps: int) -> None:
    many = unroll(schedule, steps)
    verify(many)
    assert simulate(many, costs(schedule)).makespan <= steps * simulate(schedule, costs(schedule)).makespan + 1e-9
