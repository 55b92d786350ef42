"""What only looks at training cannot end it."""

from __future__ import annotations

import pytest

from raypipe.errors import ScheduleError
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.sequence import Guard
from tests.runtime.runs.small_runs import drive, small_job


def test_a_failure_is_noted_once_and_the_rest_goes_on() -> None:
    told: list[str] = []
    guard = Guard(told.append)
    calls = []

    def fails(value: int) -> int:
        calls.append(value)
        raise ScheduleError("", "comm is -999.99\nand more", "times are finite and not negative")

    assert guard("the prediction", fails, 1) is None
    assert guard("the prediction", fails, 2) is None
    assert guard("something else", lambda: 3) == 3
    assert calls == [1]
    (notice,) = told
    assert notice.startswith("the prediction failed and is disabled")
    assert notice.endswith("ScheduleError: comm is -999.99")


@pytest.mark.runs
def test_training_survives_its_prediction(stage_pool, text_folder, tmp_path, monkeypatch) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, steps=12)
    undisturbed = drive(job, stage_pool, tmp_path / "undisturbed")

    def broken(self: StepClock, at_end: bool = False) -> None:
        raise ZeroDivisionError("whatever it meets")

    monkeypatch.setattr(StepClock, "predict", broken)
    done = drive(job, stage_pool, tmp_path / "run")
    assert done.losses == undisturbed.losses
    notices = [row for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "notice"]
    assert len(notices) == 1
    assert "the prediction" in notices[0]["message"]
    assert not list((tmp_path / "run").glob(".shared-*"))
