"""Every plan gives the loss curve of plain PyTorch, or of its update rule: float64, dropout, clipping, AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.data import prepare
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.plan.plan import Plan
from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import losses_alone, plain_losses, stashed_losses, two_buffered_losses
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 5


def make_job(path: Path, parallel: dict[str, object], tied: bool = True, **train: object) -> JobSpec:
    model = {"hidden": 32, "heads": 4, "tie_embeddings": tied}
    # The clip is below the gradient norms of the first steps, so it takes part.
    return small_job(path, parallel, model, **{"steps": STEPS, "batch": 16, "clip": 0.5, **train})


def pipeline_losses(job: JobSpec, pool, directory: Path, plan: Plan | None = None) -> list[float]:
    """The loss curve through the real driver, actors and channels."""
    return drive(job, pool, directory, plan=plan).losses


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
    {"schedule": "dualpipe", "stages": 4},
    {"schedule": "dualpipev", "stages": 2, "replicas": 2},
    {"schedule": "interleaved-overlap", "stages": 2, "chunks": 2},
    {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 3},
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
    {"schedule": "zb-h1", "stages": 2, "replicas": 4, "context": 2},
]
MORE = [
    {"schedule": "zeropp", "stages": 4, "unit": 4},
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
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2},
    {"schedule": "1f1b", "stages": 1, "replicas": 4, "context": 4, "sync": "wait-free"},
    {"schedule": "chimera", "stages": 2, "replicas": 4, "context": 4, "sync": "eager"},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2, "context": 2, "recompute": "full"},
    {"schedule": "1f1b", "stages": 2, "replicas": 4, "context": 2, "shard": "zero3"},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2, "tensor": 2},
]
"""Other shapes of the same schedules."""


@pytest.fixture(scope="session")
def reference(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    job = make_job(text_folder, {"schedule": "1f1b", "stages": 1})
    return losses_alone(job, tmp_path_factory.mktemp("reference"))


@pytest.mark.runs
@pytest.mark.parametrize("parallel", [*PLANS, *exhaustive(*MORE)], ids=lambda p: "-".join(str(v) for v in p.values()))
def test_loss_curve_is_that_of_plain_pytorch(parallel, reference, stage_pool, text_folder, tmp_path) -> None:
    losses = pipeline_losses(make_job(text_folder, parallel), stage_pool, tmp_path)
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


IN_CHUNKS = [
    {"schedule": "zb-h1", "stages": 2, "tensor": 2},
    {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 3, "shard": "zero3", "replicas": 2},
]


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel", [*IN_CHUNKS, *exhaustive(*PLANS, MORE[0])], ids=lambda p: "-".join(str(v) for v in p.values())
)
def test_the_loss_in_chunks_of_tokens_is_the_same(parallel, reference, stage_pool, text_folder, tmp_path) -> None:
    """As whole logits give it, also where W computes those of a chunk again, or may not read freed weights."""
    losses = pipeline_losses(make_job(text_folder, parallel, loss_chunk_tokens=7), stage_pool, tmp_path)
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
    losses = pipeline_losses(job, lambda _: stage_pool(4), tmp_path, plan)
    model = build_model(job, None)
    whole = sum(map(model.parameters, range(model.count)))
    (started,) = (row for row in read_rows(tmp_path / EVENTS) if row["event"] == "started")
    assert sum(device["parameters"] for device in started["devices"]) < 1.5 * whole
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


@pytest.mark.runs
@pytest.mark.parametrize("replicas", [*exhaustive(1), 2])
def test_a_free_placement_trains(replicas, reference, stage_pool, text_folder, tmp_path) -> None:
    """As a plan of the planner has it: five unequal stages on two devices, three on the one, two on the other."""
    parallel = {
        "schedule": "auto", "placement": "free", "stages": 2, "replicas": replicas, "microbatch": 4 // replicas,
    }  # fmt: skip
    job = make_job(text_folder, parallel)
    result = search(((0, 1, 0, 1, 0),), 4, CostTable.even(5), budget_s=0.1)
    plan = Plan.of(job.parallel, ((0,), (1, 2), (3,), (4,), (5,)), job.train.batch, result.schedule)
    losses = pipeline_losses(job, stage_pool, tmp_path, plan)
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)


# PipeDream and PipeDream-2BW against their update rules, written in one process without any pipeline.

# SGD with a large rate: a version more or less shows at once.
SGD = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.0}


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel",
    [
        {"stages": 4},
        {"stages": 2, "replicas": 2},
        *exhaustive({"stages": 2}, {"stages": 1, "recompute": "full"}, {"stages": 2, "replicas": 2, "context": 2}),
    ],
    ids=lambda p: "-".join(map(str, p.values())),
)
def test_two_buffered_weights(parallel, stage_pool, text_folder: Path, tmp_path: Path) -> None:
    job = make_job(text_folder, {"schedule": "pipedream-2bw", **parallel}, momentum=0.9, **SGD)
    prepare(job.data, job.model.sequence, tmp_path / "data")
    expected = two_buffered_losses(job, tmp_path / "data", STEPS)
    assert pipeline_losses(job, stage_pool, tmp_path) == pytest.approx(expected, abs=1e-9, rel=0)
    synchronous = plain_losses(job, tmp_path / "data", STEPS)
    assert expected != pytest.approx(synchronous, abs=1e-3)  # or the test could not tell them apart


@pytest.mark.runs
@pytest.mark.parametrize("stages", [*exhaustive(2), 4])
def test_weight_stashing(stages: int, stage_pool, text_folder: Path, tmp_path: Path) -> None:
    parallel = {"schedule": "pipedream", "stages": stages, "microbatch": 1}
    job = make_job(text_folder, parallel, tied=False, clip=None, optimizer="sgd", lr=0.05, weight_decay=0.0)
    prepare(job.data, job.model.sequence, tmp_path / "data")
    cut = [range(layers[0], layers[-1] + 1) for layers in make_plan(job).cut]
    expected = stashed_losses(job, tmp_path / "data", STEPS, cut)
    assert pipeline_losses(job, stage_pool, tmp_path) == pytest.approx(expected, abs=1e-9, rel=0)
    unstashed = stashed_losses(job, tmp_path / "data", STEPS, [range(0, cut[-1].stop)])
    assert expected != pytest.approx(unstashed, abs=1e-6)  # staleness shows


@pytest.mark.runs
def test_a_stop_drains_the_pipeline_and_changes_nothing_for_two_buffers(stage_pool, text_folder, tmp_path) -> None:
    """2BW's rule does not depend on when the pipeline drains, so validation must not change the curve."""
    losses = []
    for every in (0, 2):
        directory = tmp_path / str(every)
        directory.mkdir()
        job = make_job(text_folder, {"schedule": "pipedream-2bw", "stages": 2}, eval_every=every, eval_batches=1, **SGD)
        losses.append(pipeline_losses(job, stage_pool, directory))
    assert losses[0] == losses[1]
