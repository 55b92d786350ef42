"""A step on two streams: closed forms, and the same step by ticks."""

from __future__ import annotations

import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.regions.joint import in_turn, on_two_streams
from tests.plan.regions.profiles import every_assignment, made, random_profile, ticked

UNITS = [(1.0, 1.0, 1.0)] * 4


def test_one_stream_takes_the_sum_of_all_tasks() -> None:
    assert in_turn(made(UNITS, [0], [0])).step_s == 12


def test_streams_that_do_not_slow_each_other_down() -> None:
    """B3 B2 B1 B0 W0 F0 F1 F2 F3, and W3 W2 W1 beside them from the end of B3 on."""
    profile = made(UNITS, [0], [0], 2.0)
    result = on_two_streams(profile, ((3, 2, 1), ()))
    assert result.step_s == pytest.approx(9)
    assert result.ran == {3: (1, 2), 2: (2, 3), 1: (3, 4)}


def test_streams_that_only_take_turns_gain_nothing() -> None:
    profile = made(UNITS, [0], [0])
    assert on_two_streams(profile, ((3, 2, 1), ())).step_s == pytest.approx(12)


def test_a_forward_waits_for_its_update() -> None:
    """A weight gradient that begins beside the forward of its own layer holds that up all the same."""
    profile = made(UNITS, [0], [0, 1, 2, 3], 2.0)
    late = on_two_streams(profile, ((1, 2), (3,), (), (), ()))
    assert late.ran[3] == (5, 6)
    blocked = on_two_streams(profile, ((1, 2), (), (), (), (3,)))
    assert blocked.ran[3] == (8, 9)
    assert blocked.step_s == pytest.approx(late.step_s + 1) == 10


def test_one_that_begins_behind_a_forward_that_waits_for_it_is_refused() -> None:
    profile = made(UNITS, [0], [0, 1, 2, 3], 2.0)
    with pytest.raises(ScheduleError, match="forward of layer 1 waits"):
        on_two_streams(profile, ((2, 3), (), (), (1,), ()))
    with pytest.raises(ScheduleError, match="once"):
        on_two_streams(profile, ((2, 3), (), (), (), ()))


def test_tied_layers_wait_for_each_other() -> None:
    """The last layer's weight gradient is due before the first layer's forward."""
    profile = made(UNITS, [0], [0, 1], 2.0, tied=((0, 3),))
    with pytest.raises(ScheduleError, match="forward of layer 0"):
        on_two_streams(profile, ((2, 1), (), (3,)))


def test_pairs_are_played_out_as_they_were_measured() -> None:
    """One region beside one weight gradient ends when the pair did."""
    for seed in range(20):
        rng = random.Random(seed)
        costs = [(rng.uniform(0.5, 2), rng.uniform(0.5, 2), rng.uniform(0.5, 2)) for _ in range(2)]
        profile = made(costs, [0], [0, 1], rng.uniform(1, 2))
        pair = profile.pairs()[1, 1]  # F0 beside W1, which F1 waits for
        result = on_two_streams(profile, ((), (1,), ()))
        begin = costs[0][1] + costs[1][1] + costs[0][2]
        assert result.begin[1] == pytest.approx(begin)
        assert result.ran[1][1] == pytest.approx(begin + pair.sub_s)
        assert result.step_s == pytest.approx(begin + max(pair.main_s, pair.sub_s) + costs[1][0])


@pytest.mark.parametrize("seed", range(6))
def test_the_same_by_ticks(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, 4)
    every = list(every_assignment(profile))
    agreed = 0
    for assigned in rng.sample(every, min(8, len(every))):
        try:
            expected = ticked(profile, assigned, 0.002)
        except TimeoutError:
            with pytest.raises(ScheduleError):
                on_two_streams(profile, assigned)
            continue
        assert on_two_streams(profile, assigned).step_s == pytest.approx(expected, rel=5e-3)
        agreed += 1
    assert agreed


def test_memory_of_one_stream_and_of_two() -> None:
    """Two bytes a layer until its input gradient, then one until its weight gradient."""
    profile = made(UNITS, [0], [0], 2.0)
    assert in_turn(profile).peak_bytes == 8
    assert on_two_streams(profile, ((3, 2, 1), ())).peak_bytes == 8
    heavy = made(UNITS, [0], [0], 2.0, sizes=[(2.0, 2.0)] * 4)
    assert in_turn(heavy).peak_bytes == 8
    late = made(UNITS, [0], [0, 1, 2, 3], 2.0, sizes=[(2.0, 2.0)] * 4)
    # Beside F0, F1 and F2: all three wait at once, with what the new forward keeps.
    assert on_two_streams(late, ((), (1,), (2,), (3,), ())).peak_bytes == 8
    grown = made(UNITS, [0], [0, 1, 2, 3], 2.0, sizes=[(2.0, 3.0)] * 4)
    assert on_two_streams(grown, ((), (1,), (2,), (3,), ())).peak_bytes > in_turn(grown).peak_bytes
