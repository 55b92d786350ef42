"""Every plan gives the loss curve of a plain PyTorch loop: float64, dropout, clipping, tied embeddings, AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.data import prepare
from raypipe.job.spec import JobSpec, job_from
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.plan.plan import Plan
from raypipe.runtime.driver import Driver
from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import plain_losses

STEPS = 5


def make_job(path: Path, parallel: dict[str, object], tied: bool = True, **train: object) -> JobSpec:
    return job_from(
        {
            "name": "exactness",
            "model": {
                "type": "gpt", "layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 256,
                "dropout": 0.1, "tie_embeddings": tied,
            },
            "data": {"type": "bytes", "path": str(path)},
            # The clip is below the gradient norms of the first steps, so it takes part.
            "train": {
                "steps": STEPS, "batch": 16, "optimizer": "adamw", "lr": 0.01, "seed": 3, "dtype": "float64",
                "clip": 0.5, **train,
            },
            "parallel": {"microbatch": 2, **parallel},
        }
    )  # fmt: skip


def pipeline_losses(job: JobSpec, pool, directory: Path) -> list[float]:
    """The loss curve through the real driver, actors and channels."""
    prepare(job.data, job.model.sequence, directory / "data")
    log = RunLog(directory)
    driver = Driver(job, make_plan(job), directory, log, lambda *_: None)
    driver.run(pool(driver.schedule.devices * job.parallel.tensor), None, 0)
    log.close()
    return [row["loss"] for row in read_rows(directory / METRICS) if "loss" in row]


PLANS = [
    {"schedule": "1f1b", "stages": 1},
    {"schedule": "1f1b", "stages": 4, "replicas": 2, "sync": "eager"},
    {"schedule": "1f1b", "stages": 1, "replicas": 4, "microbatch": 2, "sync": "wait-free"},
    {"schedule": "gpipe", "stages": 4},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2},
    {"schedule": "bfs", "stages": 2, "chunks": 2},
    {"schedule": "chimera", "stages": 4, "replicas": 2, "sync": "eager-opt"},
    {"schedule": "chimera", "stages": 4, "pipelines": 4},
    {"schedule": "chimera", "stages": 4, "concat": "doubling"},
    {"schedule": "chimera", "stages": 4, "concat": "halving"},
    {"schedule": "chimera-tight", "stages": 4},
    {"schedule": "gems", "stages": 4},
    {"schedule": "zb-h1", "stages": 4, "replicas": 2},
    {"schedule": "zb-h2", "stages": 4},
    {"schedule": "zb-v", "stages": 2, "replicas": 2},
    {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 3},
    {"schedule": "zeropp", "stages": 4, "unit": 4},
    {"schedule": "early-recompute", "stages": 2},
    {"schedule": "1f1b", "stages": 4, "recompute": "full", "keep": [0.0, 0.4, 0.5, 1.0]},
    {"schedule": "zb-v", "stages": 2, "recompute": "full"},
    {"schedule": "shifted-critical-path", "stages": 2, "recompute": "stage-aware", "alphas": 0.67},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "recompute": ["embedding", "block.[12]", 5]},
    {"schedule": "model-parallel", "stages": 4},
    {"schedule": "fast-forward", "stages": 2, "chunks": 2},
    {"schedule": "modulo", "stages": 2, "chunks": 2},
    {"schedule": "auto", "stages": 4, "memory_limit": 3},
    {"schedule": "auto", "stages": 2, "chunks": 2, "placement": "v"},
    {"schedule": "auto", "stages": 2, "placement": "bidirectional", "replicas": 2},
    {"schedule": "1f1b", "stages": 2, "slices": 4, "replicas": 2},
    {"schedule": "gpipe", "stages": 2, "slices": 2},
    {"schedule": "zb-h1", "stages": 4, "slices": 2},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "slices": 4},
]
MORE = [
    {"schedule": "1f1b", "stages": 1, "replicas": 2},
    {"schedule": "1f1b", "stages": 2},
    {"schedule": "gpipe", "stages": 2, "replicas": 2},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2},
    {"schedule": "chimera", "stages": 2, "replicas": 2},
    {"schedule": "chimera", "stages": 4},
    {"schedule": "chimera", "stages": 2, "concat": "doubling"},
    {"schedule": "gems", "stages": 2},
    {"schedule": "zb-h1", "stages": 2},
    {"schedule": "zb-v", "stages": 2},
    {"schedule": "shifted-critical-path", "stages": 4},
    {"schedule": "1f1b", "stages": 1, "slices": 4},
    {"schedule": "1f1b", "stages": 4, "slices": 2},
    {"schedule": "zb-h1", "stages": 2, "slices": 4, "replicas": 2},
    {"schedule": "1f1b", "stages": 2, "slices": 2, "replicas": 2, "shard": "zero3"},
]
"""Other shapes of the same schedules."""


@pytest.fixture(scope="session")
def reference(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    job = make_job(text_folder, {"schedule": "1f1b", "stages": 1})
    data = tmp_path_factory.mktemp("reference")
    prepare(job.data, job.model.sequence, data)
    return plain_losses(job, data, STEPS)


@pytest.mark.runs
@pytest.mark.parametrize("parallel", [*PLANS, *exhaustive(*MORE)], ids=lambda p: "-".join(str(v) for v in p.values()))
def test_loss_curve_is_that_of_plain_pytorch(parallel, reference, stage_pool, text_folder, tmp_path) -> None:
    losses = pipeline_losses(make_job(text_folder, parallel), stage_pool, tmp_path)
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


HAND_WRITTEN = """
device 0: 0F0 0F1 0B0 0F2 0B1 0F3 0W1 0B2 0W0 0B3 0W3 0W2
device 1: 1F0 1B0 1F1 1BW1 1F2 1W0 1B2 1F3 1B3 1W2 1W3
"""


@pytest.mark.runs
@pytest.mark.parametrize("replicas", [*exhaustive(1), 2])
def test_a_hand_written_schedule_trains(replicas, reference, stage_pool, text_folder, tmp_path) -> None:
    """Split and joint backwards mixed, weight gradients in no particular order."""
    file = tmp_path / "mine.txt"
    file.write_text(HAND_WRITTEN)
    parallel = {"schedule": str(file), "stages": 2, "microbatch": 4 // replicas, "replicas": replicas}
    losses = pipeline_losses(make_job(text_folder, parallel), stage_pool, tmp_path)
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


@pytest.mark.runs
def test_a_run_takes_nothing_from_the_jobs_own_parallel_keys(reference, stage_pool, text_folder, tmp_path) -> None:
    """A job of one whole device, run by a plan of stages whose layers are divided too."""
    plan = make_plan(make_job(text_folder, {"schedule": "zb-h1", "stages": 2, "tensor": 2, "recompute": "full"}))
    job = make_job(text_folder, {})
    prepare(job.data, job.model.sequence, tmp_path / "data")
    log = RunLog(tmp_path)
    driver = Driver(job, plan, tmp_path, log, lambda *_: None)
    driver.run(stage_pool(4), None, 0)
    log.close()
    model = build_model(job, None)
    whole = sum(map(model.parameters, range(model.count)))
    (started,) = (row for row in read_rows(tmp_path / EVENTS) if row["event"] == "started")
    assert sum(device["parameters"] for device in started["devices"]) < 1.5 * whole
    losses = [row["loss"] for row in read_rows(tmp_path / METRICS) if "loss" in row]
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize("replicas", [*exhaustive(1), 2])
def test_a_free_placement_trains(replicas, reference, stage_pool, text_folder, tmp_path) -> None:
    """As a plan of the planner has it: five unequal stages on two devices, three on the one, two on the other."""
    parallel = {
        "schedule": "auto", "placement": "free", "stages": 2, "replicas": replicas, "microbatch": 4 // replicas,
    }  # fmt: skip
    job = make_job(text_folder, parallel)
    found = search(((0, 1, 0, 1, 0),), 4, CostTable.even(5), budget_s=0.1)
    plan = Plan.of(job.parallel, ((0,), (1, 2), (3,), (4,), (5,)), job.train.batch, found.schedule)
    prepare(job.data, job.model.sequence, tmp_path / "data")
    log = RunLog(tmp_path)
    driver = Driver(job, plan, tmp_path, log, lambda *_: None)
    driver.run(stage_pool(driver.schedule.devices), None, 0)
    log.close()
    losses = [row["loss"] for row in read_rows(tmp_path / METRICS) if "loss" in row]
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)
