"""Documents through the real stream: each plan has the losses of a plain loop, and a resume goes on mid-epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from raypipe.data import open_data, prepare_data
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.models.task import NextToken
from tests.data.documents_on_disk import some_documents, write_jsonl, write_parquet
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.small_runs import GPT, drive, job_for, new_driver
from tests.runtime.worker.from_memory import FromMemory

STEPS = 12


def documents_job(path: Path, parallel: dict[str, object], **train: object) -> JobSpec:
    data = {"type": "documents", "path": str(path), "block_mb": 0.004, "shuffle_blocks": 2}
    usual = {"steps": STEPS, "batch": 16, "lr": 0.001, "eval_batches": 2, "checkpoint_every": 8}
    return job_for({**GPT, "sequence": 32}, data, parallel, **{**usual, **train})


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 100 samples, so that an epoch takes six steps and a half."""
    return write_parquet(tmp_path_factory.mktemp("documents") / "a.parquet", some_documents(11), group=3)


@pytest.fixture(scope="module")
def reference(parquet: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    job, folder = documents_job(parquet, {"stages": 1}), tmp_path_factory.mktemp("plain")
    prepare_data(job, NextToken(), folder)
    samples = open_data(folder, NextToken()).samples("train")
    assert samples * 1.5 < STEPS * 16
    assert (8 * 16) % samples, "the checkpoint is in the middle of an epoch"
    return plain_losses(job, folder, STEPS, FromMemory(folder))


@pytest.mark.runs
def test_every_plan_streams_the_samples_of_a_plain_loop(parquet, reference, stage_pool, tmp_path) -> None:
    two = drive(documents_job(parquet, {"schedule": "chimera", "stages": 2, "replicas": 2}), stage_pool, tmp_path / "a")
    assert two.losses == pytest.approx(reference, abs=1e-9, rel=0)
    waits = [row["data_wait_share"] for row in two.rows]
    assert len(waits) == STEPS
    assert all(0 < wait <= 1 for wait in waits)
    # On from the middle of an epoch: in a new directory, which knows no block's samples, with other micro-batches.
    job = documents_job(parquet, {"schedule": "1f1b", "stages": 4, "microbatch": 4})
    rest = drive(job, stage_pool, tmp_path / "b", two.checkpoints[8], 8)
    assert rest.losses == pytest.approx(reference[8:], abs=1e-9, rel=0)
    assert rest.val_losses == pytest.approx(two.val_losses, abs=1e-9, rel=0)


@pytest.mark.runs
def test_a_stream_whose_process_dies_goes_on_where_it_was(parquet, reference, stage_pool, tmp_path) -> None:
    def kill(workers, _step) -> None:
        ray.kill(workers.samples, no_restart=False)

    job = documents_job(parquet, {"schedule": "1f1b", "stages": 2}, checkpoint_every=3)
    assert drive(job, stage_pool, tmp_path, saved=kill).losses == pytest.approx(reference, abs=1e-9, rel=0)


@pytest.mark.runs
def test_a_file_that_is_damaged_later_on_is_one_error(stage_pool, tmp_path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", some_documents(40))
    # A short timeout, because the second device waits for the first one's messages after the run has failed.
    job = documents_job(path, {"schedule": "1f1b", "stages": 2}, message_timeout_s=20.0)
    driver = new_driver(job, tmp_path / "run")
    path.write_bytes(path.read_bytes().replace(b'": "', b'": {'))  # of the same size
    with pytest.raises(SpecError, match=r"can't read .*a\.jsonl"):
        driver.run(stage_pool(2), None, 0)
