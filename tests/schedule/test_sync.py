"""Gradient synchronisation placed lazily, eagerly, and eagerly where a bubble follows (Chimera section 3.2)."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
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
    costs = CostTable(
        forward=(1,) * 4, input_grad=(1,) * 4, weight_grad=(1,) * 4, recompute=(0,) * 4, all_reduce=(2,) * 4,
        update=(0,) * 4,
    )  # fmt: skip
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
        forward=(1, 9, 1, 2, 5, 1, 1, 3), input_grad=(4, 1, 1, 7, 1, 2, 1, 1), weight_grad=(1,) * 8, recompute=(0,) * 8,
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
