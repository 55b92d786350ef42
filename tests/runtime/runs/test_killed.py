"""A run outlives the process that drives it and Ray Train's controller, on a cluster without a CPU to spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.runs.killing import CONTROLLER, DRIVER, JOB, events, run_killing

pytestmark = pytest.mark.runs
STEPS = 400
"""Seconds of work behind the first checkpoint, so that the kill comes in time on a busy machine."""


@pytest.fixture(scope="module")
def job(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "killed.yaml"
    path.write_text(JOB.format(path=text_folder, steps=STEPS))
    return path


@pytest.fixture(scope="module")
def undisturbed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    done = run_killing(None, job, tmp_path_factory.mktemp("undisturbed") / "run")
    assert done.status == 0, done.said
    return done.result["losses"]


@pytest.mark.parametrize(("title", "why"), [(DRIVER, "the driver's process died"), (CONTROLLER, "controller died")])
def test_a_killed_process_changes_no_loss(title: str, why: str, undisturbed, job: Path, tmp_path: Path) -> None:
    done = run_killing(title, job, tmp_path / "run")
    assert done.status == 0, done.said
    assert done.result["losses"] == undisturbed
    assert done.result["recoveries"] == 1
    assert [why in line for line in done.said.splitlines() if line.startswith("failed: ")] == [True]
    assert "Traceback" not in done.said
    assert not events(tmp_path / "run", "waiting")  # the devices were never anybody else's


def test_where_no_restart_is_allowed_it_is_one_error(job: Path, tmp_path: Path) -> None:
    done = run_killing(DRIVER, job, tmp_path / "run", "--set", "train.max_failures=0")
    assert done.status == 1
    said = [line for line in done.said.splitlines() if line.strip()]
    at = said.index("run: the driver's process died")
    assert said[at + 1].startswith("  fix: ")
    assert len(said) <= at + 3  # and the command that goes on
    assert "Traceback" not in done.said
