"""A choice that ends early has a plan that fits; what it shows only gets better."""

from __future__ import annotations

import pytest

from raypipe.plan.best_first import best_first
from raypipe.plan.choose import choose
from raypipe.plan.watch import SearchProgress, Watch
from raypipe.search.budget import Budget
from tests.plan.conftest import make_job, make_profile
from tests.plan.test_best_first import flushing, setting

TIGHT = {"layers": 6, "devices": 4, "batch": 8, "seed": 5, "clip": 1.0, "memory_bytes": 0.4 * 2**30}


def test_without_time_the_first_plan_is_the_answer() -> None:
    watch = Watch(Budget(0.0))
    result = best_first(*setting(**TIGHT), 10, flushing, watch=watch)
    assert watch.first_plan is not None
    whole = best_first(*setting(**TIGHT), 10, flushing)
    assert len(result.best) == 1
    assert result.best[0].fits
    assert result.searched < whole.searched
    assert whole.best[0].step_s <= result.best[0].step_s


def test_without_time_no_plan_is_looked_for_that_is_not_wanted() -> None:
    result = best_first(*setting(**TIGHT), 10, flushing, watch=Watch(Budget(0.0)), wanted=False)
    assert not result.best
    assert result.left


def test_what_is_shown_gets_better_until_the_bound_meets_it() -> None:
    shown: list[SearchProgress] = []
    result = best_first(*setting(**TIGHT), 1, flushing, watch=Watch(Budget(float("inf")), shown.append))
    best = [p.best_s for p in shown]
    assert best == sorted(best, reverse=True)
    assert best[-1] == result.best[0].step_s
    assert [p.bound_s for p in shown] == sorted(p.bound_s for p in shown)
    assert all(p.bound_s <= result.best[0].step_s for p in shown)


@pytest.mark.slow
def test_a_choice_that_is_stopped_is_whole() -> None:
    """Somebody stops it at its first plan: it has rows, a plan file, and a certificate."""
    shown: list[SearchProgress] = []

    def stop() -> bool:
        return any(p.best_s < float("inf") for p in shown)

    watch = Watch(Budget(60.0), shown.append, stop)
    decision = choose(make_job(), make_profile(memory_bytes=0.5 * 2**30), watch=watch)
    assert decision.best.fits
    assert decision.plan.predicted_step_s == decision.best.step_s
    assert decision.rows[0].certificate is not None
