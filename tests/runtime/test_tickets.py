"""What comes back with a call of several steps: its steps, and what workers report with the last of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from raypipe.plan.online.controller import StepMemory
from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.calls import Ticket
from raypipe.runtime.executor.step import StepResult, Written
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.asynchronous import WHOLE

CLOCK = StepClock(generate("1f1b", Shape(devices=2, microbatches=2)))
STEP = StepResult(1.0, 2, 3.0, np.zeros((0, 2)), 0, 0, 0.0, 0, StepMemory(0, {}), False)


def test_writes_that_ended_come_with_the_last_step_of_a_call() -> None:
    ended = Written(0, 7, None, 0.5)
    results = [[STEP, replace(STEP, written=ended)], None, [STEP, STEP]]
    ticket = Ticket("step", 4, [], CLOCK, (WHOLE, WHOLE))
    assert [None if one is None else one.written for one in ticket.reports(results)] == [ended, None, None]
    assert [(one.step, [r is None for r in one.results]) for one in ticket.steps(results)] == [
        (3, [False, True, False]), (4, [False, True, False])
    ]  # fmt: skip


def test_other_calls_report_what_they_return() -> None:
    assert Ticket("copy", 4, [], CLOCK).reports([None, STEP]) == [None, STEP]
