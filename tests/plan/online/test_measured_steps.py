"""Step times and the prediction from device times, also of hosts whose clocks are known to within a little only."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.plan.online.calibrate import fit_costs, message_delays
from raypipe.plan.online.measured_steps import CALIBRATION, WARM_UP, StepClock
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.passes import add_updates
from raypipe.simulate.engine import simulate

SCHEDULE = add_updates(generate("1f1b", Shape(devices=2, microbatches=4)))
STEP = simulate(SCHEDULE, CostTable.even(2, 2.0, 2.0, 2.0, comm=0.5))


def times(begin: float, offsets_s: tuple[float, float] = (0.0, 0.0)) -> list[np.ndarray]:
    """A step that began at ``begin``, as two devices report it whose clocks are off."""
    return [
        np.array([(s.start, s.end) for s in spans]) + begin + off
        for spans, off in zip(STEP.spans, offsets_s, strict=True)
    ]


@pytest.mark.parametrize("off_s", [-1000.0, -0.7, 0.7, 1000.0])
def test_clocks_that_are_off_end_no_prediction(off_s) -> None:
    clock = StepClock(SCHEDULE)
    for n in range(WARM_UP + CALIBRATION):
        step_s, _ = clock.add(WHOLE, times(100.0 * n, (0.0, off_s)))
        assert step_s > 0
    prediction = clock.predict()
    assert prediction is not None
    assert prediction.step_s > 0
    assert all(delay >= 0 for delay in prediction.costs.links)


def test_a_delay_is_never_negative() -> None:
    clock = StepClock(SCHEDULE)
    clock.add(WHOLE, times(0.0, (0.0, -3.0)))
    measured = clock.measured()
    assert measured is not None
    assert min(delay.seconds for delay in message_delays(measured)) == 0.0
    assert fit_costs([measured]).links[0] >= 0.0


def test_a_step_takes_time_even_if_its_clock_was_set_back() -> None:
    clock = StepClock(SCHEDULE)
    assert clock.add(WHOLE, times(10.0))[0] == pytest.approx(STEP.makespan)
    assert clock.add(WHOLE, times(-50.0))[0] == pytest.approx(STEP.makespan)
    step_s, bubble = clock.add(WHOLE, times(-50.0 + 2 * STEP.makespan))
    assert step_s == pytest.approx(2 * STEP.makespan)
    assert 0 < bubble < 1
