"""Multi-region joint scheduling: the paper's statements, brute force on small cases, and its memory."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.regions.joint import assign, in_turn, joint_schedule, on_two_streams
from tests.plan.regions.profiles import every_assignment, made, random_profile


def best_of_all(profile) -> float:
    result = []
    for assigned in every_assignment(profile):
        try:
            result.append(on_two_streams(profile, assigned).step_s)
        except ScheduleError:
            continue
    return min(result)


def test_the_pair_that_gains_most_is_placed_first_and_so_on() -> None:
    """Algorithm 1, lines 4 to 12, by hand: three layers, regions B 0-2 and F 0-2 of time to spare."""
    costs = [(4.0, 4.0, 1.0)] * 3
    gain = {(0, 1): 1.1, (0, 2): 1.3, (1, 1): 1.2, (1, 2): 1.4}
    # W2 gains most in the forward, W1 cannot run there before F1 unless it is first: 1.2 beats 1.1.
    assert assign(made(costs, [0], [0], gain)) == ((), (2, 1))
    gain[0, 1] = 1.25
    assert assign(made(costs, [0], [0], gain)) == ((1,), (2,))


def test_the_last_block_runs_beside_the_first_block_s_forward_where_that_gains_most() -> None:
    """DenseNet-121, section 7.2: weight gradients of DenseBlock-4 with the forward of DenseBlock-1 (R5, 10 %), the
    others' in the backward (R2: 6 %)."""
    costs = [(1.0, 1.0, 0.8)] * 8
    back = ahead = [0, 2, 4, 6]
    gain = {(r, n): 1.06 for r in range(8) for n in range(1, 8)}
    gain |= {(4, n): 1.10 for n in (6, 7)}
    joint = joint_schedule(made(costs, back, ahead, gain))
    assert set(joint.assigned[4]) == {6, 7}
    assert joint.gains
    assert joint.found.peak_bytes <= 1.1 * joint.usual.peak_bytes


def test_every_weight_gradient_but_the_first_layer_s_is_placed_once_and_in_time() -> None:
    """A step on its two streams can be played out, whatever the costs; ties are due with their first layer."""
    for seed in range(200):
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(2, 12))
        if seed % 3 == 0:
            profile = profile.model_copy(update={"tied": ((0, len(profile.layers) - 1),)})
        on_two_streams(profile, assign(profile))
        joint_schedule(profile, 1e6)


def test_against_brute_force() -> None:
    """All assignments and orders of three and four layers: never below the best, and rarely far above it."""
    over = []
    for seed in range(24):
        rng = random.Random(seed)
        profile = random_profile(rng, 3 + seed % 2)
        result, best = joint_schedule(profile, 1e6).found.step_s, best_of_all(profile)
        assert result >= best - 1e-9
        over.append(result / best - 1)
    assert fmean(over) < 0.02
    assert max(over) < 0.10


def test_where_streams_do_not_slow_each_other_down_it_is_the_best() -> None:
    for seed in range(8):
        profile = random_profile(random.Random(100 + seed), 4, (2.0, 2.0))
        assert joint_schedule(profile, 1e6).found.step_s <= 1.02 * best_of_all(profile)


def test_a_second_stream_that_does_not_pay_says_so() -> None:
    """Where two streams do less together than one, the plan says that it gains nothing."""
    joint = joint_schedule(made([(1.0, 1.0, 1.0)] * 4, [0, 2], [0, 2], 0.8), 1e6)
    assert not joint.gains
    assert joint.found.step_s > joint.usual.step_s == 12


def test_pre_scheduling_keeps_the_cap() -> None:
    """The later regions gain most, so all would wait for the forward: with a cap, the first regions do not."""
    count = 12
    costs = [(1.0, 1.0, 0.9)] * count
    gain = {(r, n): (1.5 if r >= 4 else 1.2) for r in range(8) for n in range(1, count)}
    profile = made(costs, [0, 3, 6, 9], [0, 3, 6, 9], gain, sizes=[(2.0, 2.6)] * count)
    free = joint_schedule(profile, 1e6)
    peaks = [on_two_streams(profile, assign(profile, eager)).peak_bytes for eager in range(5)]
    steps = [on_two_streams(profile, assign(profile, eager)).step_s for eager in range(5)]
    assert peaks[-1] < peaks[0]
    assert free.found.step_s == min(steps)
    caps = sorted({peak / in_turn(profile).peak_bytes for peak in peaks})
    for cap in caps:
        joint = joint_schedule(profile, cap)
        assert joint.found.peak_bytes <= cap * joint.usual.peak_bytes
        fit = [k for k, peak in enumerate(peaks) if peak <= cap * joint.usual.peak_bytes]
        assert joint.found.step_s == min(steps[k] for k in fit)
    assert joint_schedule(profile, caps[0]).eager > 0
    with pytest.raises(ScheduleError, match="times the memory of one"):
        joint_schedule(profile, 0.5)
