"""The job that `make train` runs keeps to what the README and the contract say of it."""

from pathlib import Path

from raypipe.job import load_job

QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"


def test_the_quickstart_job_is_valid_and_fills_its_pipeline():
    job = load_job(QUICKSTART)
    assert (job.name, job.data.path) == ("quickstart", "stdlib")
    assert job.parallel.devices == 2
    assert job.microbatches >= 4 * job.parallel.stages  # the share of idle time stays near a tenth
    assert job.train.steps % job.train.checkpoint_every == 0
