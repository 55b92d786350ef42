"""Weight gradients go where devices would idle; nothing else moves, and no device holds more."""

from __future__ import annotations

import pytest

from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.passes import insert_weights, split_backward
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate

SHAPES = {
    "zb-h1": {}, "zb-h2": {}, "zb-v": {}, "zeropp": {"chunks": 2, "unit": 4}, "fast-forward": {"chunks": 2},
    "modulo": {"chunks": 2},
}  # fmt: skip


def the_rest(schedule: Schedule) -> list[list[Task]]:
    return [[t for t in order if t.kind != "W"] for order in schedule.orders]


def postponed(schedule: Schedule) -> Schedule:
    """Every W at the end of its device's order, as ZeroPP's section 4 begins."""
    return schedule.with_orders(
        [*rest, *(t for t in order if t.kind == "W")]
        for rest, order in zip(the_rest(schedule), schedule.orders, strict=True)
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("patience", [0.0, 0.5, 1.0])
def test_only_weight_gradients_move(name, patience) -> None:
    shape = Shape(devices=4, microbatches=8, **SHAPES[name])
    costs = CostTable.even(stages_of(name, shape), 1.0, 1.3, 0.6, comm=0.2)
    before = generate(name, shape)
    after = insert_weights(before, costs, patience)
    verify(after)
    assert the_rest(after) == the_rest(before)
    assert sorted(map(sorted, after.orders)) == sorted(map(sorted, before.orders))
    assert all(a <= b for a, b in zip(peak_activations(after), peak_activations(before), strict=True))
    if patience == 1.0:  # a W that only ever fills idle time
        late = insert_weights(postponed(before), costs, patience, peak_activations(postponed(before)))
        assert simulate(late, costs).makespan <= simulate(postponed(before), costs).makespan + 1e-9


@pytest.mark.parametrize(("devices", "count"), [(2, 4), (4, 8), (8, 16)])
def test_1f1b_becomes_zb_h1(devices, count) -> None:
    """At 1F1B's memory, N (F + B + W) + (D - 1)(F + B - W) is the least there is (F = B = W)."""
    joint = generate("1f1b", Shape(devices=devices, microbatches=count))
    split = split_backward(joint)
    costs = CostTable.even(devices)
    assert simulate(split, costs).makespan > 3 * count + devices - 1
    filled = insert_weights(split, costs, memory_limit=[devices] * devices)
    assert simulate(filled, costs).makespan == 3 * count + devices - 1
    assert max(peak_activations(filled)) == max(peak_activations(joint))


def test_patience_keeps_the_device_for_the_next_task() -> None:
    """ZB-V with costs under which a hasty W holds up the chain."""
    costs = CostTable.even(8, 1.0, 1.3, 0.6, comm=0.2)
    base = generate("zb-v", Shape(devices=4, microbatches=8))
    hasty, patient = (simulate(insert_weights(base, costs, p), costs).makespan for p in (0.0, 1.0))
    assert patient < simulate(base, costs).makespan < hasty


def test_without_weight_gradients_nothing_moves() -> None:
    joint = generate("1f1b", Shape(devices=3, microbatches=5))
    assert insert_weights(joint, CostTable.even(3)) == joint
