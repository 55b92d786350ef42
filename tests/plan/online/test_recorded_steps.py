"""The newest steps are kept, as many as memory allows, and never across an interruption."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.recorded_steps import FEWEST, KEPT, KEPT_TASKS, RecordedStep, RecordedSteps
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.asynchronous import WHOLE


def step(number: int, tasks: int = 4) -> RecordedStep:
    return RecordedStep(number, (np.arange(2.0 * tasks).reshape(-1, 2) + 100 * number,))


def test_only_the_newest_are_kept() -> None:
    steps = RecordedSteps(generate("1f1b", Shape(devices=1, microbatches=2)))
    for number in range(1, 30):
        steps.add(step(number), follows=number > 1)
    assert [s.number for s in steps.steps] == list(range(30 - KEPT, 30))


def test_large_steps_are_kept_in_smaller_number() -> None:
    steps = RecordedSteps(generate("1f1b", Shape(devices=1, microbatches=2)))
    for number in range(1, 9):
        steps.add(step(number, tasks=KEPT_TASKS), follows=True)
    assert len(steps.steps) == FEWEST


def test_an_interruption_begins_anew() -> None:
    schedule = generate("1f1b", Shape(devices=1, microbatches=2))
    clock = StepClock(schedule)
    for number in (1, 2, 3):
        clock.add(WHOLE, [np.arange(8.0).reshape(4, 2) + 10 * number], number=number)
    assert clock.recorded is not None
    assert [s.number for s in clock.recorded.steps] == [1, 2, 3]
    clock.pause()
    clock.add(WHOLE, [np.arange(8.0).reshape(4, 2) + 100], number=4)
    assert [s.number for s in clock.recorded.steps] == [4]


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_steps_are_kept_between_fill_and_drain(name: str) -> None:
    clock = StepClock(generate(name, Shape(devices=2, microbatches=4)))
    for number, part in enumerate([(True, False), (False, False), (False, False)], 1):
        orders = clock._parts[part].orders
        times = [np.arange(2.0 * len(o)).reshape(-1, 2) + 1000 * number for o in orders]
        clock.add(part, times, number=number)
    assert clock.recorded is not None
    assert [s.number for s in clock.recorded.steps] == [2, 3]
