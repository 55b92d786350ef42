"""What the driver makes of the results of steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.run_results import RunResults
from raypipe.schedule.lowering.asynchronous import WHOLE
from tests.runtime.runs.small_runs import small_job


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
    log.close()
