"""The k of a running stage: chosen from measured times as by trying all, and taken back where it does not pay."""

from __future__ import annotations

import pytest

from raypipe.plan.online.tune_first_k import FirstKTuner, complete_at, layer_costs
from raypipe.schedule.families.reverse_first_k import reverse_first_k
from raypipe.simulate.layer_sync import layer_step_time

READY = [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0]
"""Layers whose forward, input gradient and weight gradient take 1 each."""
SLOW_FIRST = [8.0, *[0.1] * 7]
"""The sum of the first layer takes as long as all its others' weight gradients."""


def chosen(sums: list[float]) -> FirstKTuner:
    tuner = FirstKTuner(8)
    for step in (1, 2, 4):
        assert tuner.observe(step, READY, sums, 30.0) == READY
        assert tuner.k == 0
    tuner.observe(8, READY, sums, 30.0)
    return tuner


def test_costs_are_those_that_were_measured() -> None:
    costs = layer_costs(READY, SLOW_FIRST)
    assert costs.forward == costs.input_grad == costs.weight_grad == (1.0,) * 8
    assert complete_at(costs, 0) == [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0]
    assert complete_at(costs, 3) == [14.0, 15.0, 16.0, 9.0, 7.0, 5.0, 3.0, 1.0]


def test_k_is_as_good_as_any() -> None:
    tuner, costs = chosen(SLOW_FIRST), layer_costs(READY, SLOW_FIRST)
    steps = [layer_step_time(reverse_first_k(8, k), costs, "prioritised") for k in range(9)]
    assert tuner.k > 1
    assert steps[tuner.k] == pytest.approx(min(steps), rel=0.01)


def test_it_stays_where_steps_are_shorter_and_is_taken_back_where_not() -> None:
    tuner = chosen(SLOW_FIRST)
    k, ready = tuner.k, [9.0] * 8
    assert tuner.observe(16, ready, SLOW_FIRST, 29.0) == ready
    assert tuner.k == k
    assert tuner.observe(32, ready, SLOW_FIRST, 40.0) == ready
    assert tuner.k == k
    tuner = chosen(SLOW_FIRST)
    assert tuner.observe(16, ready, SLOW_FIRST, 30.5) == READY
    assert tuner.k == 0


def test_a_fast_link_and_a_given_k_leave_nothing_to_choose() -> None:
    assert chosen([0.0] * 8).k == 0
    tuner = FirstKTuner(8, fixed=20)
    assert tuner.k == 8
    for step in (1, 8, 16):
        assert tuner.observe(step, READY, SLOW_FIRST, 100.0) == READY
    assert tuner.k == 8
