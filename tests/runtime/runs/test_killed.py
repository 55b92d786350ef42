"""A run outlives its driver, Ray Train's controller and nodes that go and come."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.job.spec import load_job
from tests.runtime.runs.elastic_run import ElasticRun, TwoNodes
from tests.runtime.runs.killing import CONTROLLER, DRIVER, WORKER, copied_since, events, job_to_kill, run_killing
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.small_runs import drive

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]

STEPS = 200
"""A second or more of work behind the first checkpoint, so that the kills come in time on a busy machine."""


@pytest.fixture(scope="module")
def job(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job_to_kill(tmp_path_factory.mktemp("job") / "killed.yaml", text_folder, STEPS)


def test_killed_processes_change_no_loss(job: Path, stage_pool, tmp_path: Path) -> None:
    """A worker's, the driver's, after which the copies in the node's memory serve, and then the controller's; the other
    workers live on, and so does the one that has taken the place of the first."""
    undisturbed = drive(load_job(job), stage_pool, tmp_path / "undisturbed").losses
    copies = ("--set", "train.copy_every=3")
    done = run_killing([WORKER, DRIVER, CONTROLLER], job, tmp_path / "run", *copies, ready=copied_since)
    assert done.status == 0, done.said
    assert done.result["losses"] == undisturbed
    assert done.result["recoveries"] == 3
    assert len(events(tmp_path / "run", "recovered")) == 1
    restart, _ = events(tmp_path / "run", "restarted")
    assert restart["source"] == "neighbour"
    assert restart["step"] % 50 != 0, "it is no step of a checkpoint"
    first, *later = ([one["pid"] for one in e["devices"]] for e in events(tmp_path / "run", "started"))
    assert later == [later[0]] * 3
    assert len({*first} & {*later[0]}) == 1
    said = [line for line in done.said.splitlines() if line.startswith("failed: ")]
    assert [why in line for why, line in zip(("the driver's process died", "controller died"), said, strict=True)] == [
        True, True,
    ]  # fmt: skip
    assert "Traceback" not in done.said
    assert not events(tmp_path / "run", "waiting")  # the devices were never anybody else's


# Devices go and come while a pipeline trains over all of them: the losses stay those of one process.


def has_new_copies(run: ElasticRun) -> bool:
    """Whether copies of the last three steps, after the last checkpoint, have arrived: a busy machine takes longer."""
    copied = max((e["step"] for e in events(run.directory, "copied")), default=0)
    saved = max((e["step"] for e in events(run.directory, "checkpoint")), default=0)
    return copied > saved and copied >= run.steps() - 3


def test_devices_go_and_come(text_folder: Path, tmp_path: Path) -> None:
    nodes = TwoNodes()
    try:
        run = ElasticRun(tmp_path, text_folder, nodes.settings, "--set", "train.copy_every=3")
        try:
            run.wait(lambda: run.steps() > 60 and has_new_copies(run))
            nodes.kill()
            run.next_step_after_change(1)
            nodes.add()
            run.next_step_after_change(2)
            run.finish()
        finally:
            run.close()
    finally:
        nodes.close()
    result = run.result
    assert result, run.said
    plain = plain_losses(load_job(run.job), run.directory / "data", len(result["losses"]))
    assert result["losses"] == pytest.approx(plain, rel=0, abs=1e-9)
    # On a busy machine Ray may hear of the dead node late: an attempt on it then ends before its first step.
    changes = [change for change in result["recovery"] if change["seconds"] is not None]
    assert len(changes) == 2, (result["recovery"], run.said)
    lost, came = changes
    assert (lost["kind"], came["kind"], came["steps_repeated"]) == ("replan", "replan", 0)
    # Ray may have put the driver on the node that is killed. Copies end with it, and so do all workers.
    with_driver = any("driver's process died" in e["message"] for e in events(run.directory, "failed"))
    if not with_driver:
        restarts = events(run.directory, "restarted")
        assert restarts[0]["source"] == "neighbour"  # copies of the lost node's stages were on the other one
        # Those of a copy, and those that were queued while it was sent.
        assert sum(restart["steps_repeated"] for restart in restarts) < 3 + 4
    assert [(e["was"], e["devices"], e["plan"]["stages"]) for e in events(run.directory, "resized")] == [
        (4, 2, 2), (2, 4, 4)
    ]  # fmt: skip
    four, *_, two, again = [{at["pid"] for at in e["devices"]} for e in events(run.directory, "started")]
    assert two < again  # those whose devices stay serve on
    assert with_driver or two < four
    assert result["devices"] == 4
    assert "going on with 2 devices instead of 4" in run.said
