"""Eq. 1 by hand and against the paper's example; free regions against a clock that ticks; columns that add up."""

from dataclasses import replace

import pytest

from raypipe.cost.chimera_model import closed_form, differences, unoverlapped
from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_recompute, add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import held
from raypipe.simulate.engine import simulate


def schedule(depth, count, name="chimera", **options):
    return generate(name, Shape(devices=depth, microbatches=count, **options))


def even(depth, forward=1.0, comm=0.0, sums=0.0):
    table = CostTable.even(depth, forward=forward, input_grad=forward, weight_grad=forward, comm=comm)
    return replace(table, all_reduce=(sums,) * depth)


@pytest.mark.parametrize(
    ("depth", "forwards", "backwards"), [(2, 2, 2), (4, 4, 6), (6, 6, 10), (8, 8, 14), (32, 32, 62)]
)
def test_tasks_on_the_critical_path(depth, forwards, backwards):
    """N = D: D forwards and 2D - 2 backwards; the paper's figure 6 is D = N = 6."""
    result = closed_form(schedule(depth, depth), even(depth))
    assert (result.forwards, result.backwards) == (forwards, backwards)
    assert result.step_s == forwards + 2 * backwards


def test_one_f_one_b_and_gpipe():
    """N + D - 1 of each."""
    for name in ("1f1b", "gpipe"):
        result = closed_form(schedule(4, 8, name), even(4))
        assert (result.forwards, result.backwards) == (11, 11)


def test_by_hand():
    """D = N = 6 with F = 0.5 s, messages of 0.1 s, sums of 4 s.

    Device 1 does its last gradients of stage 4 at 18 and of stage 1 at 24 of 26 units; it is free from 20 to 22 and at
    the end, 2 s in all, for 8 s of sums.
    """
    result = closed_form(schedule(6, 6), even(6, forward=0.5, comm=0.1, sums=4.0))
    assert result.compute_s == pytest.approx(0.5 * 6 + 1.0 * 10)
    assert result.messages_s == pytest.approx(1.6)
    assert result.unoverlapped_s == pytest.approx(8 - 2)
    assert result.step_s == pytest.approx(13 + 1.6 + 6)


def test_recomputation_counts_three_forwards():
    plain = schedule(4, 4)
    recomputed = closed_form(add_recompute(plain, "late"), even(4))
    assert recomputed.backward_s == 3
    assert recomputed.compute_s == 4 + 3 * 6


def test_pairs_and_halves_count_in_micro_batches():
    doubled = closed_form(schedule(4, 8, concat="doubling"), even(4))
    halved = closed_form(schedule(4, 8, concat="halving"), even(4))
    assert doubled.backward_s == 3
    assert (
        doubled.compute_s
        >= simulate(schedule(4, 8, concat="doubling"), replace(even(4), recompute=(1.0,) * 4)).makespan
    )
    assert halved.compute_s == pytest.approx(simulate(schedule(4, 8, concat="halving"), even(4)).makespan)


def ticking(timeline, device, sums, unit, tick=1 / 64):
    """Play the free regions tick by tick: in an idle tick, the first sum that is ready advances."""
    spans = timeline.spans[device]
    ready = {
        key[:2]: max(x.end for x in spans if x.task.kind == "BW" and (x.task.stage, x.task.replica) == key[:2]) * unit
        for key in sums
    }
    left = {key[:2]: key[2] for key in sums}
    turn = sorted(left, key=ready.__getitem__)
    steps = round(timeline.makespan * unit / tick)
    for n in range(steps):
        middle = (n + 0.5) * tick
        if any(x.start * unit <= middle < x.end * unit for x in spans):
            continue
        now = next((key for key in turn if left[key] > tick / 2), None)
        if now is not None and ready[now] <= middle:
            left[now] -= tick
    return sum(max(0.0, x) for x in left.values())


@pytest.mark.parametrize(("depth", "count"), [(4, 4), (6, 6), (4, 8), (8, 8)])
@pytest.mark.parametrize("seconds", [0.25, 1.5, 4.0])
def test_free_regions(depth, count, seconds):
    plan = schedule(depth, count)
    timeline = simulate(plan, even(depth))
    for device, own in enumerate(held(plan)):
        sums = [(s, r, seconds * (1 + s / 8)) for s, r in own]
        assert unoverlapped(timeline, device, sums, 0.5) == pytest.approx(
            ticking(timeline, device, sums, 0.5), abs=0.05
        )


def test_sums_that_fit_cost_nothing():
    """A first stage's sum at the end of the last device is never free; a last stage's is, if it is short."""
    plan = schedule(4, 4)
    timeline = simulate(plan, even(4))
    (low, high) = held(plan)[0]
    assert low[0] == 0
    assert unoverlapped(timeline, 0, [(*high, 1.0)], 1.0) == 0
    assert unoverlapped(timeline, 0, [(*low, 1.0)], 1.0) == 1.0


def test_copies_make_holders():
    line = schedule(4, 8, "1f1b")
    assert closed_form(line, even(4, sums=1.0)).unoverlapped_s == 0  # one holder each: nothing to sum
    assert closed_form(line, even(4, sums=1.0), copies=2).unoverlapped_s == 1


UNEVEN = CostTable(
    forward=(2.0, 1.0, 1.0, 1.5), input_grad=(2.0, 1.2, 1.2, 1.6), weight_grad=(1.5, 1.0, 1.0, 1.5),
    recompute=(2.0, 1.0, 1.0, 1.5), all_reduce=(6.0, 2.0, 2.0, 5.0), update=(0.5, 0.2, 0.2, 0.4), comm=(0.2, 0.4, 0.2),
)  # fmt: skip


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.parametrize("sync", ["lazy", "eager", "eager-opt"])
@pytest.mark.parametrize(
    ("name", "options"), [("chimera", {}), ("1f1b", {}), ("gpipe", {}), ("chimera", {"concat": "doubling"})]
)
def test_both_columns_add_up(copies, sync, name, options):
    plan = schedule(4, 8, name, **options)
    rows = differences(plan, UNEVEN, copies, sync)
    assert sum(r.closed_s for r in rows) == pytest.approx(closed_form(plan, UNEVEN, copies).step_s)
    whole = replicate(plan, copies)
    costs = UNEVEN if whole.replicas > 1 else replace(UNEVEN, all_reduce=(0.0,) * 4)
    whole = add_updates(place_gradient_sync(whole, sync, replace(costs, update=(0.0,) * 4)))
    assert sum(r.simulated_s for r in rows) == pytest.approx(simulate(whole, costs).makespan)


def test_where_they_agree():
    """Even stages, B = 2F, no latency, no sums: the closed form is exact for every joint schedule."""
    for name, options in (("chimera", {}), ("1f1b", {}), ("gpipe", {}), ("gems", {})):
        first, *others = differences(schedule(4, 8, name, **options), even(4))
        assert first.closed_s == first.simulated_s
        assert all((r.closed_s, r.simulated_s) == (0, 0) for r in others)


def test_messages_fall_into_bubbles():
    messages = differences(schedule(4, 4), even(4, comm=0.1))[1]
    assert 0 < messages.simulated_s < messages.closed_s


def test_split_backwards_are_refused():
    with pytest.raises(ScheduleError, match="split backwards"):
        closed_form(schedule(4, 8, "zb-h1"), even(4))
