"""Runs whose devices divide the head's rows: one process's losses, float64, and checkpoints under other plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.checkpoint import open_checkpoint
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import losses_alone
from tests.runtime.runs.small_runs import drive
from tests.runtime.runs.test_exactness import STEPS, make_job

SPLIT = {"schedule": "1f1b", "stages": 2, "vocabulary": "split"}
MORE = [
    {**SPLIT, "stages": 4},
    {**SPLIT, "replicas": 2, "sync": "eager"},
    {**SPLIT, "replicas": 2, "shard": "zero1"},
    {**SPLIT, "replicas": 2, "shard": "zero3", "gather": "microbatch"},
    {**SPLIT, "replicas": 2, "context": 2},
    {**SPLIT, "recompute": "full"},
    {**SPLIT, "recompute": ["block.*"], "update": "optimistic"},
]


@pytest.fixture(scope="module", params=[False, *exhaustive(True)], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    """Whether the head is tied to the embedding."""
    return request.param


@pytest.fixture(scope="module")
def reference(tied: bool, text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    job = make_job(text_folder, {"schedule": "1f1b", "stages": 1}, tied)
    return losses_alone(job, tmp_path_factory.mktemp("reference"))


@pytest.mark.runs
def test_a_run_is_resumed_by_a_whole_head_and_back(tied, reference, stage_pool, text_folder, tmp_path) -> None:
    """A step with a divided head, one on two copies that divide all again, one with a whole head, the others with four
    shares, in chunks of tokens."""
    losses: list[float] = []
    checkpoint, done = None, 0
    sharded = {**SPLIT, "replicas": 2, "shard": "zero3", "gather": "microbatch"}
    plans = ((SPLIT, 1), (sharded, 2), ({"schedule": "1f1b", "stages": 1}, 3), ({**SPLIT, "stages": 4}, STEPS))
    for number, (parallel, until) in enumerate(plans):
        chunk = 7 if number == 3 else None
        job = make_job(text_folder, parallel, tied, checkpoint_every=1, loss_chunk_tokens=chunk)
        job = job.model_copy(update={"train": job.train.model_copy(update={"steps": until})})
        run = drive(job, stage_pool, tmp_path / str(number), checkpoint, done)
        losses += run.losses
        checkpoint, done = run.checkpoints[until], until
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)
    saved = open_checkpoint(checkpoint)
    head = f"param/{'0.token.weight' if tied else '5.project.weight'}"
    assert saved.read([head])[head].shape == (256, 32)
    assert all(torch.isfinite(value).all() for value in saved.read(saved.keys).values())


@pytest.mark.runs
@pytest.mark.parametrize("parallel", exhaustive(*MORE), ids=lambda p: "-".join(str(v) for v in p.values()))
def test_losses_are_those_of_plain_pytorch(parallel, tied, reference, stage_pool, text_folder, tmp_path) -> None:
    losses = drive(make_job(text_folder, parallel, tied), stage_pool, tmp_path).losses
    assert losses == pytest.approx(reference, abs=1e-9, rel=0)
