"""Calls of several steps: where they end, what comes back with them, what the driver makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.job.train_spec import TrainSpec
from raypipe.observe.run_dir import EVALUATE, SAVE, ask
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.online.controller import StepMemory
from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.calls import CALL_S, Due, Dues, StepsPerCall, Ticket
from raypipe.runtime.executor.step import MOST_STEPS, StepResult, Written
from raypipe.runtime.run_metrics import RunResults
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.asynchronous import WHOLE
from tests.runtime.runs.small_runs import small_job

MANY = 1000


def dues(folder: Path, copies_every: int = MANY, overdue: bool = False, **train: Any) -> Dues:
    saves: Any = SimpleNamespace(overdue=overdue)
    copies: Any = SimpleNamespace(due=lambda done: done % copies_every == 0)
    return Dues(TrainSpec(**{"steps": 100, "batch": 8, **train}), folder, saves, copies)


@pytest.mark.parametrize(
    ("train", "steps", "due"),
    [
        ({"eval_every": 7}, 7, Due(True, False, False)),
        ({"checkpoint_every": 5, "eval_every": 7}, 5, Due(False, True, False)),
        ({"copies_every": 3}, 3, Due(False, False, True)),
        ({"overdue": True}, 1, Due(False, True, False)),
        ({}, 100, Due(True, True, False)),
    ],
    ids=str,
)
def test_a_call_ends_before_what_is_due(train: dict[str, Any], steps: int, due: Due, tmp_path: Path) -> None:
    result = dues(tmp_path, **{"eval_every": 0, "checkpoint_every": 0, **train}).next_call(0, MANY, True, True, None)
    assert (len(result.parts), result.due) == (steps, due)


def test_what_users_ask_for_is_due_after_the_next_step(tmp_path: Path) -> None:
    asked = dues(tmp_path, eval_every=0, checkpoint_every=0)
    ask(tmp_path, SAVE)
    assert asked.next_call(10, 4, True, True, None).due == Due(False, True, False)
    assert len(asked.next_call(11, 4, True, True, None).parts) == 4  # once
    ask(tmp_path, EVALUATE)
    assert asked.next_call(11, 4, True, True, None).due == Due(True, False, False)
    assert len(asked.next_call(12, 4, True, True, None).parts) == 4
    stop: Any = SimpleNamespace(pauses=True, why="asked")
    result = asked.next_call(15, 4, True, True, stop)
    assert (len(result.parts), result.due) == (1, Due(False, True, False))


def test_an_asynchronous_pipeline_fills_once_and_drains_once(tmp_path: Path) -> None:
    """Its steps overlap within a call and from call to call."""
    every = dues(tmp_path, eval_every=5, checkpoint_every=0)
    first = every.next_call(0, 3, True, False, None)
    second = every.next_call(3, 3, first.due.anything, False, None)
    assert [*first.parts, *second.parts] == [
        (True, False),
        (False, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert second.due.anything


@pytest.mark.parametrize(("step_s", "most"), [(CALL_S / 4.5, 4), (CALL_S, 1), (10.0, 1), (1e-5, MOST_STEPS)])
def test_calls_stay_short(step_s: float, most: int) -> None:
    calls = StepsPerCall()
    for _ in range(3):
        assert calls.most == 1  # until that many have been measured
        calls.took(step_s)
    assert calls.most == most
    calls.took(2 * CALL_S)
    assert calls.most == 1  # the longest counts
    calls.forget()
    assert calls.most == 1


# What comes back with a call of several steps: its steps, and what workers report with the last of them.

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


# What the driver makes of the results of steps.


def test_a_step_that_a_recovery_repeats_has_one_row(text_folder: Path, tmp_path: Path) -> None:
    """All devices may have reported a step whose update none had made final when one of them died."""
    job = small_job(text_folder, {"stages": 2})
    heard: list[int] = []
    metrics: Any = SimpleNamespace(step=lambda row, clock, devices: heard.append(row["step"]))
    nothing: Any = None
    log = RunLog(tmp_path)
    results = RunResults(job, tmp_path / "data", 1.0, log, metrics, nothing)

    def step(number: int) -> None:
        loss = 1.0 / number
        of = StepResult(loss, job.train.batch, 4.0, np.zeros((0, 2)), 0, 0, 0.0, 0, StepMemory(0, {}), True)
        assert results.step(number, WHOLE, nothing, [of], 1, timed=False) is not None

    for number in (1, 2, 2, 3):  # after the second step the run goes on from the first
        step(number)
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / METRICS)] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert heard == [1, 2, 3]
    results.forget()  # a rewind removes the rows
    step(2)
    assert heard == [1, 2, 3, 2]
