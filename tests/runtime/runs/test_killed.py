"""A run outlives the process that drives it and Ray Train's controller, on a cluster without a CPU to spare."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.job import load_job
from tests.runtime.runs.killing import CONTROLLER, DRIVER, JOB, copied_since, events, run_killing
from tests.runtime.runs.small_runs import drive

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
STEPS = 200
"""A second or more of work behind the first checkpoint, so that the kills come in time on a busy machine."""


@pytest.fixture(scope="module")
def job(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "killed.yaml"
    path.write_text(JOB.format(path=text_folder, steps=STEPS))
    return path


def test_killed_processes_change_no_loss(job: Path, stage_pool, tmp_path: Path) -> None:
    """The driver's, after which the copies in the node's memory serve, and then the controller's."""
    undisturbed = drive(load_job(job), stage_pool, tmp_path / "undisturbed").losses
    copies = ("--set", "train.copy_every=3")
    done = run_killing([DRIVER, CONTROLLER], job, tmp_path / "run", *copies, ready=copied_since)
    assert done.status == 0, done.said
    assert done.result["losses"] == undisturbed
    assert done.result["recoveries"] == 2
    first, _ = events(tmp_path / "run", "restarted")
    assert first["source"] == "neighbour"
    assert first["step"] % 50 != 0, "it is no step of a checkpoint"
    said = [line for line in done.said.splitlines() if line.startswith("failed: ")]
    assert [why in line for why, line in zip(("the driver's process died", "controller died"), said, strict=True)] == [
        True, True,
    ]  # fmt: skip
    assert "Traceback" not in done.said
    assert not events(tmp_path / "run", "waiting")  # the devices were never anybody else's


@pytest.mark.exhaustive  # tests/runtime/cluster/test_ray_train.py counts restarts without processes
def test_where_no_restart_is_allowed_it_is_one_error(job: Path, tmp_path: Path) -> None:
    done = run_killing([DRIVER], job, tmp_path / "run", "--set", "train.max_failures=0")
    assert done.status == 1
    said = [line for line in done.said.splitlines() if line.strip()]
    at = said.index("run: the driver's process died")
    assert said[at + 1].startswith("  fix: ")
    assert len(said) <= at + 3  # and the command that goes on
    assert "Traceback" not in done.said
