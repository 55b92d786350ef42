"""What a user sees of a mistake in data, model or schedule: the error itself, at once and only once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypipe.cli import run
from raypipe.errors import SampleCountError, ScheduleError
from raypipe.plan.online import better_order
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime import set_up_workers
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import forwards_alone
from tests.runtime.runs.killing import events
from tests.runtime.runs.small_runs import drive, new_driver, small_job

JOB = """
name: wrong
model: {{import: "{here}:Three"}}
data: {{type: arrays, path: "{path}"}}
train: {{steps: 8, batch: 8, lr: 0.01, seed: 0, eval_batches: 1}}
parallel: {{schedule: 1f1b, stages: 2, microbatch: 2}}
"""


def wrong_job(folder: Path) -> Path:
    """A job of three classes with labels of a further one."""
    labels = np.arange(40) % 3
    labels[::4] = 7
    rows, job = folder / "rows.npz", folder / "wrong.yaml"
    np.savez(rows, features=np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32), labels=labels)
    job.write_text(JOB.format(here="tests.runtime.runs.three_classes", path=rows))
    return job


@pytest.mark.runs
def test_labels_that_no_class_has_end_the_run_at_once(driver_here, tmp_path: Path, capfd) -> None:
    directory = tmp_path / "run"
    assert run(["train", str(wrong_job(tmp_path)), "--run-dir", str(directory), "--json"]) == 1
    said = capfd.readouterr().err
    assert "device 1, " in said, said
    error = said[said.index("stage 1 · replica 0 · device 1, ") :].splitlines()
    assert error[0].startswith("stage 1 · replica 0 · device 1, 1F0 of step 1: IndexError: Target 7 is out of bounds.")
    assert error[1].startswith("  fix: correct the model, its data or the job")
    assert len(error) == 2
    assert "Traceback" not in said
    assert not events(directory, "restarted")
    assert str(directory / "failure.txt") in error[1]
    assert "IndexError: Target 7 is out of bounds." in (directory / "failure.txt").read_text()


@pytest.mark.runs
def test_labels_that_no_class_has_end_a_profile_at_once(local_ray, tmp_path: Path, capfd) -> None:
    assert run(["profile", str(wrong_job(tmp_path)), "--quick", "--devices", "2"]) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    error = said[said.index("profile · device ") :].splitlines()
    assert "IndexError: Target 7 is out of bounds." in error[0]
    assert error[1:] == ["  fix: correct the model, its data or the job"]


# A step whose devices do not count each sample once is an error, not a result.


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
