"""PipeDream and PipeDream-2BW against their update rules, written in one process without any pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.data import prepare
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import plain_losses, stashed_losses, two_buffered_losses
from tests.runtime.runs.test_exactness import STEPS, make_job, pipeline_losses

# SGD with a large rate: a version more or less shows at once.
SGD = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.0}


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel",
    [{"stages": 4}, {"stages": 2, "replicas": 2}, *exhaustive({"stages": 2}, {"stages": 1, "recompute": "full"})],
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
