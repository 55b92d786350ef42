"""What a user sees of a mistake in data or model: the device, the task and the error itself, at once and only once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.runs.killing import environment, events, run_killing

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


def test_labels_that_no_class_has_end_the_run_at_once(tmp_path: Path) -> None:
    job, run = wrong_job(tmp_path), tmp_path / "run"
    done = run_killing(None, job, run)
    assert done.status == 1, done.said
    assert "device 1, " in done.said, done.said
    error = done.said[done.said.index("stage 1 · replica 0 · device 1, ") :].splitlines()
    assert error[0].startswith("stage 1 · replica 0 · device 1, 1F0 of step 1: IndexError: Target 7 is out of bounds.")
    assert error[1].startswith("  fix: correct the model, its data or the job")
    assert len(error) == 2
    assert "Traceback" not in done.said
    assert not events(run, "restarted")
    assert str(run / "failure.txt") in error[1]
    assert "IndexError: Target 7 is out of bounds." in (run / "failure.txt").read_text()


def test_labels_that_no_class_has_end_a_profile_at_once(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.runtime.runs.killing", "profile", str(wrong_job(tmp_path)), "--quick"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    error = done.stderr[done.stderr.index("profile · device ") :].splitlines()
    assert "IndexError: Target 7 is out of bounds." in error[0]
    assert error[1:] == ["  fix: correct the model, its data or the job"]
