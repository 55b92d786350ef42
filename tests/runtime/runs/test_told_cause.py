"""What a user sees of a mistake in data or model: the device, the task and the error itself, at once and only once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypipe.cli import run
from tests.runtime.runs.killing import events

pytestmark = pytest.mark.runs
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


def test_labels_that_no_class_has_end_a_profile_at_once(local_ray, tmp_path: Path, capfd) -> None:
    assert run(["profile", str(wrong_job(tmp_path)), "--quick", "--devices", "2"]) == 1
    said = capfd.readouterr().err
    assert "Traceback" not in said
    error = said[said.index("profile · device ") :].splitlines()
    assert "IndexError: Target 7 is out of bounds." in error[0]
    assert error[1:] == ["  fix: correct the model, its data or the job"]
