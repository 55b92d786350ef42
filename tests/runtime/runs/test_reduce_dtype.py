"""Gradients summed in another dtype: a plain PyTorch loop that rounds as two members do, float64, 1e-9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.data import Corpus, prepare
from raypipe.job.spec import JobSpec
from raypipe.plan.less_memory import less_memory
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import mean_loss, whole_gpt
from tests.runtime.runs.small_runs import drive, small_job

STEPS = 4
PLANS = [
    {"stages": 2},
    {"sync": "reverse-first-k", "first_k": 2},
    {"shard": "zero2"},
    {"stages": 2, "shard": "zero3"},
    *exhaustive({}, {"sync": "prioritised"}, {"shard": "zero1"}, {"shard": "zero3"}),
]


def job_of(text: Path, parallel: dict[str, Any], **train: Any) -> JobSpec:
    """Untied: a matrix of two stages would be summed over four devices."""
    return small_job(text, {"replicas": 2, **parallel}, model={"tie_embeddings": False}, steps=STEPS, **train)


def plain(job: JobSpec, data: Path, dtype: torch.dtype | None) -> list[float]:
    """Two halves of each mini-batch; their gradients are rounded, added in ``dtype``, and brought back."""
    model = whole_gpt(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.train.lr, weight_decay=job.train.weight_decay)
    corpus = Corpus.open(data)
    losses = []
    half = job.train.batch // 2
    for step in range(STEPS):
        total, found = 0.0, []
        for rows in (range(half), range(half, 2 * half)):
            loss = mean_loss(job, model, corpus, step, rows) / 2
            found.append(torch.autograd.grad(loss, list(model.parameters())))
            total += loss.item()
        for p, one, two in zip(model.parameters(), *found, strict=True):
            p.grad = one + two if dtype is None else (one.to(dtype) + two.to(dtype)).to(p.dtype)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def data(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = job_of(text_folder, {})
    folder = tmp_path_factory.mktemp("plain")
    prepare(job.data, job.model.sequence, folder)
    return folder


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: "-".join(str(v) for v in p.values()) or "lazy")
def test_losses_of_a_loop_that_rounds(parallel, data, stage_pool, text_folder, tmp_path) -> None:
    job = job_of(text_folder, {**parallel, "reduce_dtype": "bfloat16"})
    expected = plain(job, data, torch.bfloat16)
    assert drive(job, stage_pool, tmp_path).losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != pytest.approx(plain(job, data, None)[-1], abs=1e-9, rel=0)


@pytest.mark.runs
def test_groups_of_copies_sum_in_it_too(stage_pool, text_folder, tmp_path) -> None:
    """Four copies in pairs: rounded more often, by about as much."""
    wide = {"replicas": 4, "microbatch": 1}
    own = drive(job_of(text_folder, wide), stage_pool, tmp_path / "own")
    shards = {"shard": "zero2", "shard_replicas": 2}
    cast = drive(job_of(text_folder, {**wide, **shards, "reduce_dtype": "bfloat16"}), stage_pool, tmp_path / "cast")
    assert cast.losses == pytest.approx(own.losses, rel=5e-3)
    assert cast.losses[1:] != own.losses[1:]


@pytest.mark.runs
def test_wider_sums_of_narrow_gradients(stage_pool, text_folder, tmp_path) -> None:
    """A sum of two bfloat16 numbers, made in float32 and rounded once, is their bfloat16 sum: the losses are equal."""
    losses = [
        drive(job_of(text_folder, keys, dtype="bfloat16-true"), stage_pool, tmp_path / str(n)).losses
        for n, keys in enumerate(({}, {"reduce_dtype": "float32"}))
    ]
    assert losses[0] == losses[1]


def test_it_stays_when_a_plan_changes(text_folder) -> None:
    job = job_of(text_folder, {"reduce_dtype": "bfloat16"})
    found = less_memory(job, make_plan(job))
    assert found is not None
    assert found[0].parallel.reduce_dtype == "bfloat16"
