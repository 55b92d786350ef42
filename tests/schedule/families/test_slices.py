"""Schedules of slices: the dependency rule, closed forms, the least memory by brute force, costs along the sequence."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.text import from_text, to_text, to_torch_csv
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.passes import replicate, split_backward, without_frozen
from raypipe.schedule.verify import verify
from raypipe.search.problem import build
from raypipe.simulate.engine import simulate
from raypipe.simulate.lower_bound import lower_bound

SLICED = [name for name, family in SCHEDULES.items() if "slices" in family.options]
counts = st.integers(1, 5)


def sliced(name: str, devices: int, microbatches: int, slices: int, **more: int) -> Schedule:
    return generate(name, Shape(devices=devices, microbatches=microbatches, slices=slices, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SLICED)
@settings(max_examples=25, deadline=None)
@given(devices=counts, microbatches=counts, slices=st.integers(2, 6), data=st.data())
def test_slices_run_in_order_and_return_in_reverse(
    name: str, devices: int, microbatches: int, slices: int, data: st.DataObject
) -> None:
    more = {"chunks": data.draw(st.integers(1, 3))} if "chunks" in SCHEDULES[name].options else {}
    schedule = sliced(name, devices, microbatches, slices, **more)
    verify(schedule)
    assert schedule.microbatches == microbatches * slices
    assert schedule.size == Fraction(1, slices)
    for one in (schedule, split_backward(schedule), replicate(schedule, 2)):
        verify(one)
        for order in one.orders:
            at = {(t.kind, t.stage, t.mbs[0]): k for k, t in enumerate(order)}
            for (kind, stage, mb), k in at.items():
                if mb % slices and kind in ("F", "B", "BW"):
                    before = at[kind, stage, mb - 1]
                    assert (before < k) == (kind == "F")


@pytest.mark.parametrize(("depth", "count", "slices"), [(1, 2, 3), (2, 1, 4), (4, 8, 4), (4, 2, 8), (3, 5, 2)])
def test_closed_forms(depth: int, count: int, slices: int) -> None:
    costs = CostTable.even(depth, 2, 3, 1)
    ids = count * slices
    for name in ("1f1b", "gpipe"):
        timeline = simulate(sliced(name, depth, count, slices), costs)
        assert timeline.makespan == pytest.approx((ids + depth - 1) * 6 / slices)
    held = simulate(sliced("1f1b", depth, count, slices), costs).peak_activations
    assert held == tuple(min(depth - s + slices - 1, ids) / slices for s in range(depth))
    shape = Shape(devices=depth, microbatches=count, slices=slices)
    zero_bubble = simulate(generate("zb-h1", shape, costs), costs)
    assert zero_bubble.makespan <= timeline.makespan * (1 + 1e-9)
    assert max(zero_bubble.peak_activations) <= max(held)


def least_memory(slices: int, count: int) -> int:
    """The fewest slices that the only stage of a step can hold at once: over all orders that the rule allows."""
    tasks = [Task(kind, 0, (mb,)) for kind in ("F", "BW") for mb in range(slices * count)]
    everything = sliced("gpipe", 1, count, slices).with_orders([tasks])
    graph = link(everything)
    best = slices * count
    for order in itertools.permutations(range(len(tasks))):
        place = {i: k for k, i in enumerate(order)}
        if all(place[p] < place[i] for i in range(len(tasks)) for p in graph.preds[i]):
            live = list(itertools.accumulate(1 if tasks[i].kind == "F" else -1 for i in order))
            best = min(best, max(live))
    return best


@pytest.mark.parametrize(("slices", "count"), [(2, 1), (3, 1), (2, 2)])
def test_no_order_of_one_stage_holds_less_than_one_micro_batch(slices: int, count: int) -> None:
    assert least_memory(slices, count) == slices
    (held,) = simulate(sliced("1f1b", 1, count, slices), CostTable.even(1)).peak_activations
    assert held == 1.0


def test_attention_takes_longer_along_the_sequence() -> None:
    schedule = split_backward(sliced("1f1b", 2, 1, 4))
    costs = CostTable(
        forward=(8.0, 8.0), input_grad=(12.0, 12.0), weight_grad=(4.0, 4.0), recompute=(8.0, 8.0), update=(1.0, 1.0),
        attention=(4.0, 0.0), attention_grad=(8.0, 0.0),
    )  # fmt: skip
    times = dict(zip(schedule.tasks(), costs.durations(schedule, list(schedule.tasks())), strict=True))
    assert [times[Task("F", 0, (i,))] for i in range(4)] == [1 + (2 * i + 1) / 4 for i in range(4)]
    assert [times[Task("F", 1, (i,))] for i in range(4)] == [2.0] * 4
    assert [times[Task("B", 0, (i,))] for i in range(4)] == [1 + (2 * i + 1) / 2 for i in range(4)]
    assert [times[Task("W", 0, (i,))] for i in range(4)] == [1.0] * 4
    joint = sliced("gpipe", 2, 1, 4)
    assert sum(costs.durations(joint, list(joint.tasks()))) == pytest.approx(2 * (8 + 12 + 4))
    again, read = from_json(to_json(joint, costs))
    assert (again, read) == (joint, costs)
    assert {"dur"} <= to_json(joint, costs)["orders"][0][0].keys()


@pytest.mark.parametrize("name", SLICED)
def test_forms_keep_slices(name: str) -> None:
    schedule = sliced(name, 3, 2, 4)
    assert from_text(to_text(schedule)) == schedule
    assert from_text(to_text(schedule).replace("size 1/4\n", "")) == schedule
    with pytest.raises(ScheduleError, match="cut into 4 slices"):
        to_torch_csv(schedule)
    costs = CostTable.even(schedule.stages)
    assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


def test_a_frozen_stage_without_a_backward_keeps_the_rule() -> None:
    schedule = without_frozen(sliced("1f1b", 3, 2, 2), [0])
    verify(schedule)
    assert {t.kind for t in schedule.orders[0]} == {"F"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("device 0: 0F1 0F0 0BW1 0BW0", "0F1 waits for 0F0"),
        ("device 0: 0F0 0F1 0BW0 0BW1", "0BW0 waits for 0BW1"),
        ("device 0: 0F0 0BW0 0F1 0BW1", "0BW0 waits for 0BW1"),
        ("device 0: 0F0,1 0BW1 0BW0", "carries several ids"),
        ("device 0: 0F0 0BW0", "2 slices for 1 ids"),
        ("size 1/3\ndevice 0: 0F0 0F1 0BW1 0BW0", "each 1/3 of a micro-batch"),
        ("versions stash\ndevice 0: 0F0 0F1 0BW1 0BW0", "weight versions"),
        ("placement 0\nplacement 0\ndevice 0: 0F0 0F1@1 0BW1@1 0BW0", "another replica"),
    ],
)
def test_wrong_orders_are_refused(change: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        verify(from_text(f"slices 2\n{change}\n"))


def test_other_families_and_searches_refuse() -> None:
    for name in SCHEDULES.keys() - set(SLICED):
        with pytest.raises(ScheduleError, match="has no use for slices = 2"):
            sliced(name, 4, 4, 2)
    with pytest.raises(ScheduleError, match="orders are not searched"):
        build([(0,)], 2, CostTable.even(1), rules=sliced("1f1b", 1, 1, 2).rules)
    with pytest.raises(ScheduleError, match="is no part of forward"):
        CostTable.even(1).__class__(forward=(1.0,), input_grad=(1.0,), weight_grad=(1.0,), attention=(2.0,))
