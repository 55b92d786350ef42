"""Schedules without the gradients that frozen stages need not: every family, against the flow of gradients by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task, backwards
from raypipe.schedule.live_activations import peak_activations, weight_versions
from raypipe.schedule.lowering.messages_in_flight import held_messages
from raypipe.schedule.lowering.programs import check_counted, programs, step_programs
from raypipe.schedule.lowering.safe_order import gpu_programs
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    closed_up,
    forwards_alone,
    place_gradient_sync,
    replicate,
    shard,
    without_frozen,
)
from raypipe.schedule.verify import verify
from raypipe.search import search
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period

FROZEN = {"first half": lambda s: range(s // 2), "all but the last": lambda s: range(s - 1), "second": lambda s: [1]}


def made(name: str, frozen: str) -> tuple[Schedule, Schedule]:
    """The family's schedule, and without what the frozen stages need not."""
    chunks = 2 if "chunks" in SCHEDULES[name].options else 1
    whole = generate(name, Shape(devices=4, microbatches=8, chunks=chunks))
    return whole, without_frozen(whole, FROZEN[frozen](whole.stages))


def lowered(schedule: Schedule) -> Any:
    """The programs of two copies with their sums and updates, counted and put in an order for GPUs."""
    if schedule.versions == "flush":
        schedule = add_updates(place_gradient_sync(replicate(schedule, 2), "eager"))
        verify(schedule)
    train, evaluate = step_programs(schedule), programs(forwards_alone(schedule))
    check_counted(train, evaluate, schedule)
    gpu_programs(train, evaluate, schedule.microbatches, schedule.versions)
    return train


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_every_family(name: str, frozen: str) -> None:
    whole, less = made(name, frozen)
    verify(less)
    costs = CostTable.even(less.stages, comm=0.1)
    assert simulate(less, costs).makespan <= simulate(whole, costs).makespan + 1e-9
    assert period(less, costs) <= period(whole, costs) * (1 + 1e-9)
    assert all(a <= b for a, b in zip(peak_activations(less), peak_activations(whole), strict=True))
    assert from_text(to_text(less), "file") == less
    assert from_json(to_json(less, costs), "file")[0] == less
    verify(add_recompute(less, "early"))
    stages, done = less.rules.frozen, Counter((t.kind, t.stage) for t in less.tasks() for _ in t.mbs)
    trains = [s not in stages for s in range(less.stages)]
    count = less.microbatches
    for s in range(less.stages):
        behind = any(trains[:s])  # a gradient passes on to a stage before
        assert done["F", s] == count
        assert done["W", s] + done["BW", s] == (count if trains[s] else 0)
        own = trains[s] and not whole.rules.skip_first_b
        if done["BW", s] == 0:
            assert done["B", s] == (count if behind or own else 0)
        assert done["R", s] <= (count if behind or trains[s] else 0)
    train = lowered(less)
    sent = {(m.src_stage, m.dst_stage) for rows in train.values() for p in rows for a in p.actions for m in a.sends
            if m.direction == "grad"}  # fmt: skip
    assert sent == {(s, s - 1) for s in range(1, less.stages) if any(trains[:s])}


CLOSED = {
    ("zb-h1", "first half"): 27.3, ("zb-h1", "second"): 28.2, ("zb-h1", "all but the last"): 27.3,
    ("1f1b", "first half"): 30.0, ("interleaved-1f1b", "all but the last"): 35.3,
}  # fmt: skip
"""Shortest steps within the schedules' memory, by search, whose lower bound they meet."""


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_gaps_are_closed_in_no_more_memory(name: str, frozen: str) -> None:
    _, less = made(name, frozen)
    closed = closed_up(less)
    verify(closed)
    assert all(a <= b for a, b in zip(peak_activations(closed), peak_activations(less), strict=True))
    assert sorted(closed.tasks()) == sorted(less.tasks())
    for weight, message in ((1.0, 0.0), (1.0, 0.1), (0.2, 0.1)):
        costs = CostTable.even(less.stages, weight_grad=weight, comm=message)
        assert simulate(closed, costs).makespan <= simulate(less, costs).makespan + 1e-9
    step = simulate(closed, CostTable.even(less.stages, comm=0.1)).makespan
    assert step == pytest.approx(CLOSED.get((name, frozen), step))
    lowered(closed)


def orders_of(tasks: tuple[tuple[Task, ...], ...]) -> Iterator[tuple[tuple[Task, ...], ...]]:
    """Every order of each device's tasks."""
    yield from product(*(permutations(own) for own in tasks))


@pytest.mark.parametrize(("name", "frozen"), [("zb-h1", (0,)), ("chimera", (0,)), ("gems", (0,))])
def test_no_order_in_this_memory_is_shorter(name: str, frozen: tuple[int, ...]) -> None:
    """By trying all orders of two devices' tasks."""
    less = without_frozen(generate(name, Shape(devices=2, microbatches=2)), frozen)
    closed, costs, peaks = closed_up(less), CostTable.even(less.stages, comm=0.1), peak_activations(less)
    shortest = float("inf")
    for orders in orders_of(less.orders):
        tried = less.with_orders(orders)
        if all(a <= b for a, b in zip(peak_activations(tried), peaks, strict=True)):
            with suppress(ScheduleError):  # devices that wait for one another
                shortest = min(shortest, simulate(tried, costs).makespan)
    assert simulate(closed, costs).makespan == pytest.approx(shortest)


def test_what_is_not_plain_stays_as_it_is() -> None:
    """Recomputed, sharded, asynchronous, forwards of several micro-batches, or too long to be ordered often."""
    _, less = made("1f1b", "first half")
    pairs = generate("chimera", Shape(devices=4, microbatches=8, concat="doubling"))
    long = without_frozen(generate("interleaved-1f1b", Shape(devices=4, microbatches=512, chunks=2)), range(4))
    for schedule in (
        add_recompute(made("1f1b", "second")[1], "early"), made("pipedream", "second")[1], long,
        shard(replicate(made("zeropp", "first half")[1], 2), 3, copies=2), without_frozen(pairs, [0, 1]),
    ):  # fmt: skip
        assert closed_up(schedule) is schedule
    assert closed_up(less).stages == 4


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_frozen_weights_have_one_version(name: str) -> None:
    whole, less = made(name, "second")
    expected = list(weight_versions(whole))
    if name == "pipedream":
        expected[1] = 1
    assert list(weight_versions(less)) == expected


def test_gradients_on_a_graph_stop_before_the_first_trained_stage() -> None:
    """Two frozen towers join; one of them has a trained stage at its end."""
    graph = StageGraph(5, ((0, 1), (1, 4), (2, 3), (3, 4)))
    result = backwards(graph, Rules(frozen=(0, 2, 3, 4)))
    assert [(b.input_grad, b.weight_grad, b.sends_to) for b in result] == [
        (False, False, ()), (True, True, ()), (False, False, ()), (False, False, ()), (True, False, (1,)),
    ]  # fmt: skip


def test_frozen_stages_are_not_sharded_and_recompute_nothing_without_a_backward() -> None:
    _, less = made("zeropp", "first half")
    schedule = add_updates(place_gradient_sync(shard(replicate(less, 2), 3, copies=2), "lazy"))
    verify(schedule)
    assert schedule.sharding is not None
    assert schedule.sharding.levels == (0, 0, 0, 0, 3, 3, 3, 3)
    assert {t.stage for t in schedule.tasks() if t.kind in ("AG", "RS", "FREE", "AR")} == {4, 5, 6, 7}
    late = without_frozen(shard(replicate(generate("bfs", Shape(devices=2, microbatches=2)), 2), 3, copies=2), [0])
    verify(late)
    assert not [t for t in late.tasks() if t.stage == 0 and t.kind != "F"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("frozen 0\ndevice 0: 0F0 0B0\ndevice 1: 1F0 1BW0\n", "no stage up to it has a trained"),
        ("frozen 0\ndevice 0: 0F0\ndevice 1: 1F0\n", "no device runs 1"),
        ("frozen 1\ndevice 0: 0F0 0BW0\ndevice 1: 1F0 1BW0\n", "stage 1 is frozen and has no weight gradient"),
        ("frozen 1\ndevice 0: 0F0 0BW0\ndevice 1: 1F0\n", "1B0 or 1BW0, which no device runs"),
        ("frozen 0 1\ndevice 0: 0F0\ndevice 1: 1F0\n", "nothing would be trained"),
        ("frozen 2\ndevice 0: 0F0 0BW0\ndevice 1: 1F0 1BW0\n", "use|of 2 stages"),
    ],
)
def test_what_is_too_much_or_missing_is_one_error(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        verify(from_text(text))


def test_a_searched_order_is_as_short_as_its_bound_and_no_longer_than_a_familys() -> None:
    """Also within a memory limit; the frozen half has nothing but forwards."""
    row, costs = (0, 1, 2, 3), CostTable.even(4, comm=0.1)
    rules = Rules(frozen=(0, 1))
    free = search((row,), 8, costs, rules=rules, budget_s=1.0)
    assert free.makespan <= simulate(made("zb-h1", "first half")[1], costs).makespan + 1e-9
    tight = search((row,), 8, costs, rules=rules, memory_limit=2, budget_s=1.0)
    for result in (free, tight):
        verify(result.schedule)
        assert result.bound <= result.makespan + 1e-9
    verify(tight.schedule, memory_limit=2)
    joint = search((row,), 8, costs, rules=rules, split=False, budget_s=0.5)
    verify(joint.schedule)
    assert not [t for t in joint.schedule.tasks() if t.stage < 2 and t.kind != "F"]


def test_forwards_that_nothing_holds_back_are_counted_as_messages() -> None:
    """A stage of forwards alone may be all micro-batches ahead of the next."""
    _, less = made("1f1b", "first half")
    whole, _ = made("1f1b", "second")
    before, after = (max(held_messages(one, [1.0] * one.stages)[1]) for one in (whole, less))
    assert before < less.microbatches <= after


def test_stages_of_the_pass_stay_frozen() -> None:
    _, less = made("1f1b", "second")
    assert without_frozen(less, []) == less
    assert without_frozen(less, [0]).rules.frozen == (0, 1)
    assert stages_of("1f1b", Shape(devices=4, microbatches=8)) == 4
    with pytest.raises(ScheduleError, match="leave at least one"):
        without_frozen(less, [0, 2, 3])
    assert replace(less, rules=Rules()).backwards[1].weight_grad
