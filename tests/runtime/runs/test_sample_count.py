"""A step whose devices do not count each sample once is an error, not a result."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import SampleCountError, ScheduleError
from raypipe.plan.online import better_order
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime import set_up_workers
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import forwards_alone
from tests.runtime.runs.small_runs import drive, new_driver, small_job


def half_forward(schedule: Schedule) -> Schedule:
    """A validation batch that leaves out the second half of it."""
    less = schedule.microbatches // 2
    forwards = forwards_alone(schedule)
    return forwards.with_orders([t for t in order if t.mbs[0] < less] for order in forwards.orders)


@pytest.mark.runs
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_schedule_of_another_batch_ends_the_first_step(
    replicas: int, stage_pool, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(plan: Plan, batch: int) -> Schedule:
        return build_schedule(Plan.of(plan.parallel, plan.cut, batch // 2), batch // 2)

    monkeypatch.setattr(better_order, "build_schedule", half)
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2, "replicas": replicas}, batch=16)
    with pytest.raises(SampleCountError) as caught:
        drive(job, stage_pool, tmp_path)
    assert caught.value.where == "step 1"
    assert caught.value.why == "its loss covers 8 samples instead of 16"
    assert not list((tmp_path / "checkpoints").glob("*/manifest.json"))


@pytest.mark.runs
def test_a_validation_of_a_part_of_its_batch_is_no_result(
    stage_pool, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up_workers, "forwards_alone", half_forward)
    monkeypatch.setattr(set_up_workers, "check_counted", lambda *_: None)
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, steps=1, eval_batches=2)
    with pytest.raises(SampleCountError, match="validation after step 1: its loss covers 8 samples instead of 16"):
        drive(job, stage_pool, tmp_path)


def test_programs_are_held_against_the_micro_batches_before_they_run(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_driver(small_job(text_folder, {"schedule": "1f1b", "stages": 2}), tmp_path)
    set_up_workers.lower(made.running, gpus=False)
    monkeypatch.setattr(set_up_workers, "forwards_alone", half_forward)
    with pytest.raises(ScheduleError, match="in validation, the forward of micro-batch 2 on stage 0 runs 0 times"):
        set_up_workers.lower(made.running, gpus=False)
