"""Small jobs, run by the real driver on the session's stage actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.data import declared_fields, prepare_data
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.plan import Plan
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.executor.metrics import validation_metrics
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.worker.worker import StageWorker
from raypipe.runtime.worker.worker_group import WorkerGroup, start_worker_group, titles_of
from raypipe.train import make_plan
from tests.job_files import minimal_job

Pool = Callable[[int], WorkerGroup]
GPT = {
    "type": "gpt", "layers": 4, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256, "dropout": 0.1,
    "tie_embeddings": True,
}  # fmt: skip


def job_for(
    model: dict[str, Any], data: Path | str | dict[str, Any], parallel: dict[str, Any], **train: Any
) -> JobSpec:
    """A few steps in float64; ``data``: a file of arrays, a folder of text, or the whole section."""
    usual = {"steps": 4, "batch": 8, "lr": 0.01, "seed": 3, "dtype": "float64", "eval_batches": 1}
    return minimal_job(model, data, {"microbatch": 2, **parallel}, **{**usual, **train})


def small_job(text: Path, parallel: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> JobSpec:
    """Four layers, tied and with dropout; everything else is up to the test."""
    return job_for({**GPT, **(model or {})}, text, parallel, **train)


@dataclass(frozen=True)
class Done:
    """What a run left behind."""

    losses: list[float]
    val_losses: list[float]
    rows: list[dict[str, Any]]
    """Step rows of metrics.jsonl."""
    checkpoints: dict[int, Path]
    """By steps done."""
    driver: Driver


def new_driver(
    job: JobSpec, directory: Path, saved: Callable[..., None] = lambda *_: None, plan: Plan | None = None,
    log: type[RunLog] = RunLog,
) -> Driver:  # fmt: skip
    """A driver with its data prepared, whose log is in ``directory``; ``plan``: another than the job's own.

    Whoever runs a job with ``train.copy_every`` ends its copies: ``driver.copies``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prepare_data(job, build_model(job, declared_fields(job.data)).task, directory / "data")
    validation = validation_metrics(job.train)
    log_of_run = log(directory)
    copies = NeighbourCopies(job.train.copy_every, log_of_run)
    return Driver(job, plan or make_plan(job), directory, log_of_run, saved, copies, validation)


@contextmanager
def own_workers(driver: Driver, worker: type[StageWorker] = StageWorker) -> Iterator[WorkerGroup]:
    """Start workers on reserved devices, as a run does without a pool; with the block they end."""
    parallel = driver.running.plan.parallel
    devices = driver.schedule.devices * parallel.tensor
    place = reserve(devices, connect(devices), 120.0, together=parallel.tensor)
    workers = start_worker_group(titles_of(driver.schedule, parallel.replicas, parallel.tensor), place, worker)
    try:
        yield workers
    finally:
        workers.stop()


def drive(
    job: JobSpec, pool: Pool, directory: Path, checkpoint: Path | None = None, done: int = 0,
    saved: Callable[[WorkerGroup, int], None] | None = None, plan: Plan | None = None,
) -> Done:  # fmt: skip
    """Run to the end. ``saved(fleet, step)`` is called at every checkpoint."""
    checkpoints: dict[int, Path] = {}

    def keep(step: int, path: Path, _metrics: dict[str, Any]) -> None:
        checkpoints[step] = path
        if saved is not None:
            saved(workers, step)

    driver = new_driver(job, directory, keep, plan)
    workers = pool(driver.schedule.devices * job.parallel.tensor)
    driver.run(workers, checkpoint, done)
    rows = read_rows(directory / METRICS)
    return Done(
        [r["loss"] for r in rows if "loss" in r],
        [r["val_loss"] for r in rows if "val_loss" in r],
        [r for r in rows if "loss" in r],
        checkpoints,
        driver,
    )
