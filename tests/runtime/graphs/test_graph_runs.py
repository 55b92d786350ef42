"""Runs whose compiled stages are recorded graphs, over real messages: the loss curves of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raypipe.errors import SpecError
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.worker.worker_group import WorkerGroup
from tests.actor_pool import actor_pool
from tests.exhaustive import exhaustive
from tests.runtime.graphs.recording_worker import RecordingWorker
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.small_runs import drive, small_job

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 2}, "zb-h1": {"stages": 2}, "zb-v": {"stages": 2}, "chimera": {"stages": 2},
    "1f1b, two copies": {"schedule": "1f1b", "stages": 1, "replicas": 2},
}  # fmt: skip
"""Two copies sum their gradients in flat tensors."""
TRAIN = {
    "compile": "inductor", "compile_first": True, "cuda_graphs": "tasks", "clip": 0.5, "lr": 0.01,
    "lr_schedule": "cosine", "warmup_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def recording_pool(local_ray: None) -> Iterator[Callable[[int], WorkerGroup]]:
    """As ``stage_pool``, of workers that record graphs."""
    with actor_pool(RecordingWorker, "recording actor") as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.parametrize("name", ["zb-v", *exhaustive(*(name for name in SCHEDULES if name != "zb-v"))])
def test_losses_are_those_of_plain_pytorch(
    name: str, recording_pool: Callable[[int], WorkerGroup], text_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("raypipe.runtime.set_up_workers.check_graphs", lambda wanted, gpus: None)
    job = small_job(text_folder, {"schedule": name, **SCHEDULES[name]}, **TRAIN)
    done = drive(job, recording_pool, tmp_path)
    counts = ray.get([actor.counts.remote() for actor in recording_pool(2).actors])
    assert done.losses == pytest.approx(plain_losses(job, tmp_path / "data", 4), abs=1e-9, rel=0)
    assert all(replays > captures > 0 for captures, replays in counts)
    assert [row["message"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "notice"] == []


@pytest.mark.slow
@pytest.mark.runs
def test_whole_steps_of_one_device_with_validations_between(
    recording_pool: Callable[[int], WorkerGroup], text_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("raypipe.runtime.set_up_workers.check_graphs", lambda wanted, gpus: None)
    job = small_job(
        text_folder, {"schedule": "1f1b", "stages": 1}, {"layers": 2},
        steps=5, clip=0.5, lr_schedule="cosine", warmup_steps=2, eval_every=2, cuda_graphs="step",
    )  # fmt: skip
    done = drive(job, recording_pool, tmp_path)
    assert ray.get(recording_pool(1).actors[0].counts.remote()) == (1, 3)
    assert done.losses == pytest.approx(plain_losses(job, tmp_path / "data", 5), abs=1e-9, rel=0)
    eager = job.model_copy(update={"train": job.train.model_copy(update={"cuda_graphs": "none"})})
    assert done.val_losses == pytest.approx(
        drive(eager, recording_pool, tmp_path / "eager").val_losses, abs=1e-9, rel=0
    )
    assert [row["message"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "notice"] == []


@pytest.mark.runs
def test_cpu_devices_are_refused(recording_pool: Any, text_folder: Path, tmp_path: Path) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, **TRAIN)
    with pytest.raises(SpecError, match=r"train\.cuda_graphs: tasks needs GPU devices"):
        drive(job, recording_pool, tmp_path)
