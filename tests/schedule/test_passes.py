"""Passes: gradient synchronisation placed lazily or eagerly, weight gradients where devices would idle."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.passes import add_updates, insert_weights, place_gradient_sync, replicate, split_backward
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate

CHIMERA = generate("chimera", Shape(devices=4, microbatches=4))


def positions(schedule: Schedule, device: int) -> dict[int, int]:
    """Per stage, how many compute tasks of the device come before its all-reduce."""
    order = schedule.orders[device]
    return {t.stage: sum(u.kind != "AR" for u in order[:k]) for k, t in enumerate(order) if t.kind == "AR"}


def test_lazy_comes_after_all_compute() -> None:
    assert all(set(positions(place_gradient_sync(CHIMERA, "lazy"), d).values()) == {8} for d in range(4))


def test_eager_follows_the_last_gradient() -> None:
    eager = place_gradient_sync(CHIMERA, "eager")
    for d in range(4):
        order = [t for t in eager.orders[d] if t.kind != "AR"]
        last = {t.stage: k + 1 for k, t in enumerate(order) if t.kind == "BW"}
        assert positions(eager, d) == last


def test_eager_opt_is_eager_at_the_ends_and_lazy_in_the_middle() -> None:
    """Devices 0 and 3 hold the first and the last stage and idle before their last backward; 1 and 2 do not."""
    opt = place_gradient_sync(CHIMERA, "eager-opt")
    assert positions(opt, 0) == {3: 6, 0: 8}
    assert positions(opt, 1) == {2: 8, 1: 8}
    assert positions(opt, 2) == {2: 8, 1: 8}
    assert positions(opt, 3) == {3: 6, 0: 8}


def test_eager_hides_in_bubbles_what_lazy_adds() -> None:
    costs = CostTable(forward=(1,) * 4, input_grad=(1,) * 4, weight_grad=(1,) * 4, all_reduce=(2,) * 4)
    spent = {p: simulate(place_gradient_sync(CHIMERA, p), costs).makespan for p in ("lazy", "eager", "eager-opt")}  # type: ignore[arg-type]
    assert spent == {"lazy": 20, "eager": 18, "eager-opt": 18}


def test_one_holder_needs_no_all_reduce_and_copies_do() -> None:
    one = generate("1f1b", Shape(devices=2, microbatches=3))
    assert place_gradient_sync(one, "eager") == one
    two = add_updates(place_gradient_sync(replicate(one, 2), "eager"))
    verify(two)
    assert [t for t in two.tasks() if t.kind == "AR"] == [
        Task("AR", s, (), r) for s, r in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    assert two.orders[3][-2:] == (Task("AR", 1, (), 1), Task("U", 1, (), 1))
    assert two.placement == ((0, 1), (2, 3))


def test_every_device_issues_in_one_order() -> None:
    uneven = CostTable.even(8).__class__(
        forward=(1, 9, 1, 2, 5, 1, 1, 3), input_grad=(4, 1, 1, 7, 1, 2, 1, 1), weight_grad=(1,) * 8,
        all_reduce=(5,) * 8, update=(1,) * 8,
    )  # fmt: skip
    for pipelines in (2, 4, 8):
        for policy in ("lazy", "eager", "eager-opt"):
            made = generate("chimera", Shape(devices=8, microbatches=16, pipelines=pipelines))
            placed = place_gradient_sync(replicate(made, 2), policy, uneven)  # type: ignore[arg-type]
            verify(placed)
            rows = [[t.stage for t in order if t.kind == "AR"] for order in placed.orders]
            turn = {s: n for row in rows for n, s in enumerate(row)}
            for row in rows:
                assert len(set(row)) == pipelines
            seen: dict[int, set[int]] = {}
            for row in rows:
                for k, stage in enumerate(row):
                    seen.setdefault(stage, set()).update(row[k + 1 :])
            assert not any(a in seen[b] for a in seen for b in seen[a]), turn


def test_unknown_policy() -> None:
    with pytest.raises(ScheduleError, match="eager-opt"):
        place_gradient_sync(CHIMERA, "eager-op")  # type: ignore[arg-type]


# Weight gradients go where devices would idle; nothing else moves, and no device holds more.

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
