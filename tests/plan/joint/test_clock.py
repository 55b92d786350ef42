"""The clock that judges plans, on cases small enough to work out by hand."""

from __future__ import annotations

import pytest

from tests.bench.planners.judge import ring_sum
from tests.bench.planners.systems import dealt, recomputing
from tests.plan.joint.clock import Before, Layer, Timed, period, time_of

LAYERS = [Layer(1.0, 1.0, 1.0, 2.0, kept=10.0, waiting=5.0, state=100.0, arriving=4.0)] * 2
TWO = "microbatches 2\ndevice 0: 0F0 0F1 0BW0 0BW1\ndevice 1: 1F0 1BW0 1F1 1BW1"


def test_a_line_of_two_devices() -> None:
    """Device 1: F 2..3, BW 3..5, F 5..6, BW 6..8; device 0 ends after a message of 1 and a backward of 2: 11."""
    timed = time_of(TWO, [[0], [1]], LAYERS, [1.0, 0.0])
    assert timed.makespan == 11.0
    assert timed.peaks == [120.0, 110.0]
    assert timed.graded == {(0, 0): 11.0, (1, 1): 8.0}


def test_what_is_recomputed_keeps_its_input_and_takes_its_forward_again() -> None:
    text = recomputing(TWO)
    assert "0R0 0BW0 0R1 0BW1" in text
    late = time_of(text.replace("device 0", "recompute late\ndevice 0"), [[0], [1]], LAYERS, [0.0, 0.0])
    assert late.makespan == 1 + (1 + 1 + 2) * 2 + 1 + 2
    assert late.peaks == [100 + 4 + 10, 110]
    early = time_of(text, [[0], [1]], LAYERS, [0.0, 0.0])
    assert early.makespan == 11.0  # device 0's first R runs while it waits


def test_a_first_stage_without_b_still_runs_back_through_its_layers() -> None:
    text = "skip_first_B\ndevice 0: 0F0 0W0\ndevice 1: 1F0 1B0 1W0"
    timed = time_of(text, [[0, 1], [2]], [*LAYERS, LAYERS[0]], [0.0] * 3)
    assert timed.makespan == 2 + 1 + 1 + (2 + 1)  # two W and the second layer's input gradient


@pytest.mark.parametrize(("sums", "steady"), [(0.0, 9.0), (3.0, 12.0)])
def test_a_step_begins_when_weights_are_new(sums: float, steady: float) -> None:
    """Nothing overlaps on the device that both begins and ends a step: 9 of compute, then the sum."""

    def step(before: Before | None) -> Timed:
        return time_of(TWO, [[0], [1]], LAYERS, [0.0, 0.0], before=before)

    assert period(step, {0: sums, 1: sums})[0] == steady


def test_gradients_are_there_from_the_first_on() -> None:
    layers = [x._replace(gradient=50.0) for x in LAYERS]
    text = "device 0: 0F0 0F1 0BW0 0BW1"
    assert time_of(text, [[0, 1]], layers).peaks == [200 + 2 * 20 + 100]


def test_sums_enter_a_host_once() -> None:
    fast, slow = (0.0, 1.0), (0.0, 10.0)
    assert ring_sum([0], 2, 4, 8.0, fast, slow) == 0.0
    assert ring_sum([0, 2], 2, 4, 8.0, fast, slow) == 2 * 4 * 20  # the host's other device sums as well
    assert ring_sum([0, 1, 2, 3], 2, 4, 8.0, fast, slow) == min(2 * 3 * 2 * 10, 8 + 2 * 2 * 20)
    assert dealt(7, 3) == [[0, 1], [2, 3], [4, 5, 6]]
