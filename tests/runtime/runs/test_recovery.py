"""A worker that dies at a chosen moment of a step is replaced; the others live on, and no loss changes by a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.cluster.worker_group import start_worker_group
from tests.runtime.runs.dying_worker import dying
from tests.runtime.runs.small_runs import drive, new_driver, small_job

pytestmark = pytest.mark.runs
STEP = 2
TWO_COPIES = {"schedule": "1f1b", "stages": 2, "replicas": 2}
FOLDED = {"schedule": "zb-v", "stages": 2, "replicas": 2, "microbatch": 1}
BOTH_WAYS = {"schedule": "chimera", "stages": 4, "microbatch": 1}
TRAIN: dict[str, Any] = {"steps": 5, "eval_every": 3, "checkpoint_every": 3}


@pytest.mark.parametrize(
    ("parallel", "train", "rank", "moment", "repeated"),
    [
        pytest.param(TWO_COPIES, {}, 0, "F 0", 1, id="first-task"),
        pytest.param(TWO_COPIES, {}, 3, "summed 0", 1, id="gradients-not-told"),
        pytest.param(TWO_COPIES, {"clip": 0.5}, 1, "agreed 0", None, id="before-its-update"),
        pytest.param(TWO_COPIES, {}, 3, "ended 0", None, id="result-not-delivered"),
        pytest.param(FOLDED, {"clip": 100.0}, 2, "U 1", None, id="between-its-optimistic-updates"),
        pytest.param(FOLDED, {"clip": 100.0}, 1, "told 0", None, id="optimistic-and-told"),
        pytest.param(BOTH_WAYS, {"clip": 0.5}, 1, "U 1", None, id="between-its-updates"),
        pytest.param(BOTH_WAYS, {}, 3, "BW 1", 1, id="in-a-backward"),
        pytest.param(TWO_COPIES, {}, 0, "write 0", None, id="while-it-writes-its-shard"),
    ],
)
def test_a_worker_is_replaced(
    parallel: dict[str, Any], train: dict[str, Any], rank: int, moment: str, repeated: int | None, text_folder: Path,
    stage_pool, tmp_path: Path,
) -> None:  # fmt: skip
    job = small_job(text_folder, parallel, **TRAIN, **train)
    undisturbed = drive(job, stage_pool, tmp_path / "undisturbed")
    file = tmp_path / "dies"
    file.write_text(f"{rank} {STEP} {moment}")
    directory = tmp_path / "disturbed"
    driver = new_driver(job, directory)
    copies = job.parallel.replicas
    workers = start_worker_group(driver.schedule, copies, DeviceRequest(cpus=1.0, gpus=0.0), dying(file))
    before = [at.pid for at in workers.locations]
    try:
        driver.run(workers, None, 0)
    finally:
        workers.stop()
        driver.log.close()
    assert not file.exists()  # it has died
    rows = read_rows(directory / METRICS)
    assert [r["loss"] for r in rows if "loss" in r] == undisturbed.losses
    assert [r["val_loss"] for r in rows if "val_loss" in r] == undisturbed.val_losses
    assert [r["grad_norm"] for r in rows if "loss" in r] == [r["grad_norm"] for r in undisturbed.rows]
    (event,) = [e for e in read_rows(directory / EVENTS) if e["event"] == "recovered"]
    assert event["steps_repeated"] in ((0, 1) if repeated is None else (repeated,))
    newest, skipped = latest(directory / "checkpoints")
    assert newest is not None
    assert (newest.name, skipped) == ("step-00000005", [])
    for path in (directory / "checkpoints").glob("step-*"):  # whatever was being written when the worker died
        found = open_checkpoint(path)
        assert {file.name for file in path.iterdir()} == {"manifest.json", *found.files.values()}
    given_up = [e for e in read_rows(directory / EVENTS) if "step 3 is given up" in e.get("message", "")]
    assert len(given_up) == (moment == "write 0")
    after = [at.pid for at in workers.locations]
    assert [a == b for a, b in zip(before, after, strict=True)] == [r != rank for r in range(len(before))]
