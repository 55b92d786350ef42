"""The k of a running stage: chosen from measured times as by trying all, and taken back where it does not pay."""

from __future__ import annotations

import pytest

from raypipe.plan.online.tune_first_k import FirstKTuner, complete_at, layer_costs, layer_step_time
from raypipe.schedule.families.out_of_order import HeldMemory, most_postponed, reverse_first_k

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


HELD = [40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0, 110.0]
WAITING = [10.0] * 8
"""What the usual backward holds at each layer's gradient, and what each adds to it where it is postponed."""


def held_beside(waiting: list[float], held: list[float] = HELD) -> HeldMemory:
    return HeldMemory(0.0, held, [all_ - own for all_, own in zip(held, waiting, strict=True)], waiting)


@pytest.mark.parametrize(("memory", "most"), [(200.0, 8), (119.0, 8), (109.0, 0), (110.0, 8)])
def test_what_memory_allows(memory: float, most: int) -> None:
    """At the gradient of layer i wait those of i + 1 to k - 1: 40 + 70 at most, for the first layer and k = 8."""
    tuner = FirstKTuner(8, memory=memory)
    for step in (1, 2, 4, 8):
        assert tuner.wants_memory
        tuner.observe(step, READY, SLOW_FIRST, 30.0, held_beside(WAITING))
    assert tuner.most == most
    assert tuner.k <= most
    assert (tuner.k > 0) == (most > 0)


def test_a_large_wait_caps_the_choice() -> None:
    """Each adds 30 where the backward frees 10 a layer: the first layer's gradient is the fullest moment."""
    for most in range(9):
        memory = 110.0 if most < 3 else 40.0 + 30.0 * (most - 1)
        limit = most_postponed(held_beside([30.0] * 8), memory)
        peaks = [max(HELD[i] + 30.0 * max(0, k - 1 - i) for i in range(8)) for k in range(9)]
        assert limit == max((k for k in range(9) if peaks[k] <= memory), default=0)
        tuner = FirstKTuner(8, memory=memory)
        for step in (1, 2, 4, 8):
            tuner.observe(step, READY, SLOW_FIRST, 30.0, held_beside([30.0] * 8))
        assert tuner.k <= limit


def test_a_given_k_waits_for_what_the_first_step_holds() -> None:
    tuner = FirstKTuner(8, fixed=5, memory=129.0)
    assert (tuner.k, tuner.wants_memory) == (0, True)
    less = [size / 2 for size in HELD]  # there is no optimizer's state before the first update
    assert tuner.observe(1, READY, SLOW_FIRST, 30.0, held_beside([30.0] * 8, less)) == READY
    assert (tuner.k, tuner.wants_memory) == (0, True)
    after = tuner.observe(2, READY, SLOW_FIRST, 30.0, held_beside([30.0] * 8))
    assert tuner.k == tuner.most == 3
    assert after == complete_at(layer_costs(READY, SLOW_FIRST), 3)
    assert not tuner.wants_memory
    assert tuner.observe(4, READY, SLOW_FIRST, 30.0) == READY
    assert tuner.k == 3
    free = FirstKTuner(8, fixed=5, memory=1e9)
    free.observe(2, READY, SLOW_FIRST, 30.0, held_beside(WAITING))
    assert free.k == 5
