"""Merak's three ways to recompute on 1F1B, F = R = 1 and BW = 2 (PAPERS, Merak)."""

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.passes import add_recompute, keep_activations
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate


@pytest.mark.parametrize(("stages", "count"), [(4, 5), (8, 16), (2, 4), (3, 3), (6, 20), (4, 8)])
def test_bubbles(stages: int, count: int) -> None:
    shape, costs = Shape(devices=stages, microbatches=count), CostTable.even(stages, recompute=1)
    late = add_recompute(generate("1f1b", shape), "late")
    made = [late, generate("early-recompute", shape), generate("shifted-critical-path", shape)]
    for schedule in made:
        verify(schedule)
    spent = [simulate(s, costs).makespan for s in made]
    work = 4 * count
    assert spent == [work + 4 * (stages - 1), work + 3 * (stages - 1), work + 3 * (stages - 2)]


def test_a_heavier_head_is_absorbed_by_the_last_stage() -> None:
    """It saves its R, so its tasks may take that much longer and the step does not."""
    even = CostTable.even(4, recompute=1)
    heavy = CostTable(forward=(1, 1, 1, 1.3), input_grad=(1, 1, 1, 1.6), weight_grad=(1,) * 4, recompute=(1,) * 4)
    schedule = generate("shifted-critical-path", Shape(devices=4, microbatches=12))
    early = generate("early-recompute", Shape(devices=4, microbatches=12))
    gain = simulate(schedule, heavy).makespan - simulate(schedule, even).makespan
    assert gain < 0.3 * (simulate(early, heavy).makespan - simulate(early, even).makespan)


def test_recomputed_activations_live_from_r() -> None:
    timeline = simulate(generate("shifted-critical-path", Shape(devices=4, microbatches=8)), CostTable.even(4))
    assert timeline.peak_activations == (1, 1, 1, 1)
    partly = add_recompute(generate("1f1b", Shape(devices=4, microbatches=8)), "late", [0])
    assert simulate(partly, CostTable.even(4)).peak_activations == (1, 3, 2, 1)


def test_recompute_can_be_taken_off_again() -> None:
    plain = generate("1f1b", Shape(devices=3, microbatches=4))
    assert add_recompute(add_recompute(plain), stages=[]).orders == plain.orders
    with pytest.raises(ScheduleError, match="stage 3 of 3"):
        add_recompute(plain, stages=[3])
    with pytest.raises(ScheduleError, match="known: early, late"):
        add_recompute(plain, "sometimes")  # type: ignore[arg-type]


def test_kept_shares_save_recomputation_and_take_memory() -> None:
    stages, count = 4, 16
    full = generate("early-recompute", Shape(devices=stages, microbatches=count))
    plain = generate("1f1b", Shape(devices=stages, microbatches=count))
    assert keep_activations(full, [1.0] * stages).orders == plain.orders
    assert keep_activations(full, [0.0] * stages).orders == full.orders
    half = keep_activations(full, [0.25, 0.5, 0.5, 1.0])
    verify(half)
    kinds = [[t.kind for t in order] for order in half.orders]
    assert [k.count("R") for k in kinds] == [12, 8, 8, 0]
    # Of the 4, 3, 2, 1 in flight at most 1, 2, 1, 1 are kept; the one going back is one of these or recomputed.
    assert simulate(half, CostTable.even(stages)).peak_activations == (2, 2, 2, 1)


def test_merak_shares_make_every_stage_wait_for_as_much_recomputation() -> None:
    """Merak section 3.4: a_i = min(1, (s-1) a_1 / (s-i)) uses on every stage the memory of a_1 on the first."""
    stages, count, first = 8, 64, 0.5
    shares = [min(1.0, (stages - 1) * first / (stages - 1 - i)) if i < stages - 1 else 1.0 for i in range(stages)]
    full = generate("early-recompute", Shape(devices=stages, microbatches=count))
    kept = keep_activations(full, shares)
    verify(kept)
    peaks = simulate(kept, CostTable.even(stages)).peak_activations
    assert max(peaks) <= peaks[0] + 1
    costs = CostTable.even(stages, recompute=1)
    assert simulate(kept, costs).makespan < simulate(full, costs).makespan * 0.9


def test_shares_that_make_no_sense_are_refused() -> None:
    full = generate("early-recompute", Shape(devices=2, microbatches=4))
    with pytest.raises(ScheduleError, match="1 shares for 2 stages"):
        keep_activations(full, [0.5])
    with pytest.raises(ScheduleError, match="use 0 to 1"):
        keep_activations(full, [0.5, 1.5])
