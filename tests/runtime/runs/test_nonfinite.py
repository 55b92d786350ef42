"""``train.on_nonfinite``: what is skipped, and what is left out, is what a plain PyTorch loop skips and leaves out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raypipe.checkpoint import open_checkpoint
from raypipe.data import declared_fields, known_fields, open_data, prepare_data
from raypipe.errors import DivergenceError
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, read_rows
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.small_runs import drive, job_for

pytestmark = pytest.mark.runs
STEPS, BATCH = 6, 8
HERE = "tests.runtime.runs.test_nonfinite"


def mlp() -> nn.Module:
    inner = (part for _ in range(2) for part in (nn.Linear(8, 8), nn.Tanh()))
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *inner, nn.Linear(8, 3))


def make_job(folder: Path, parallel: dict[str, Any], **train: Any) -> JobSpec:
    data = {"type": "arrays", "path": str(folder / "rows.npz"), "held_out": str(folder / "held_out.npz")}
    parallel = {"schedule": "1f1b", "stages": 2, **parallel}
    return job_for({"import": f"{HERE}:mlp"}, data, parallel, **{"steps": STEPS, "batch": BATCH, "lr": 0.05, **train})


def write(folder: Path, features: np.ndarray, labels: np.ndarray) -> None:
    np.savez(folder / "rows.npz", features=features, labels=labels)
    np.savez(folder / "held_out.npz", features=np.ones((8, 5)), labels=np.zeros(8, dtype=np.int64))


def prepared(job: JobSpec, data: Path) -> Any:
    prepare_data(job, build_model(job, declared_fields(job.data)).task, data)
    return open_data(data, build_model(job, known_fields(data)).task)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of which the mini-batches 2 and 3 (from 0) do not train.

    A feature that is infinite saturates a tanh: the loss is finite, but the gradient of the first stage is 0 * inf. One
    that is not a number makes the loss so.
    """
    folder = tmp_path_factory.mktemp("bad")
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 120)
    features = draw.normal(size=(120, 5)) + labels[:, None]
    features[:, 0] = np.arange(120)  # which row it is
    write(folder, features, labels)
    job = make_job(folder, {})
    dataset = prepared(job, folder / "numbers")
    rows = [dataset.batch("train", job.train.seed, step, BATCH)["features"][:, 0].long() for step in (2, 3)]
    features[:, 0] = draw.normal(size=120)
    features[int(rows[0][5]), 1] = np.inf
    features[int(rows[1][2]), 3] = np.nan
    write(folder, features, labels)
    return folder


class Plain:
    """AdamW on the whole model, where a mini-batch whose gradients are not finite makes no step."""

    def __init__(self, job: JobSpec, data: Path, minibatches: Iterable[int], delayed: bool = False) -> None:
        dataset = prepared(job, data)
        model = build_model(job, known_fields(data))
        start = {n: p.detach() for n, p in model.build_stage(range(model.count), job.train.seed).named().items()}
        self.module, older = (with_values(mlp().double(), start) for _ in range(2))
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=job.train.lr, weight_decay=job.train.weight_decay)
        self.losses: list[float] = []
        self.skipped: list[int] = []
        for step, number in enumerate(minibatches, 1):
            rows = dataset.batch("train", job.train.seed, number, BATCH)
            used = older if delayed else self.module  # PipeDream-2BW takes gradients at the weights before
            loss = F.cross_entropy(used(rows["features"].double()), rows["labels"])
            gradients = torch.autograd.grad(loss, list(used.parameters()))
            for p, q, g in zip(older.parameters(), self.module.parameters(), gradients, strict=True):
                p.data.copy_(q.data)
                q.grad = g
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), job.train.clip or float("inf"))
            if torch.isfinite(norm):
                optimizer.step()
                self.losses.append(loss.item())
            else:
                self.skipped.append(step)

    def check(self, path: Path) -> None:
        """The checkpoint holds these parameters."""
        saved = open_checkpoint(path)
        for layer in (0, 2, 4, 6):
            for name, value in self.module[layer].named_parameters():
                key = next(k for k in saved.keys if k.startswith("param/") and k.endswith(f"{layer}.{name}"))
                torch.testing.assert_close(saved.read([key])[key], value.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({"schedule": "zb-v", "update": "optimistic", "microbatch": 1}, {}),
        ({"replicas": 2, "shard": "zero3"}, {}),
        ({"schedule": "pipedream-2bw"}, {"clip": 0.5}),
        *exhaustive(
            ({"replicas": 2}, {"clip": 0.5}),
            ({}, {}),
            ({"schedule": "zb-h2", "update": "optimistic"}, {"clip": 10.0}),
            ({"stages": 1, "replicas": 2}, {}),
        ),
    ],
    ids=["zb-v optimistic", "zero3", "2bw", "replicas", "1f1b", "zb-h2 optimistic", "data-parallel"],
)
def test_no_device_makes_an_update_that_any_of_them_must_not(
    parallel: dict[str, Any], train: dict[str, Any], folder: Path, stage_pool, tmp_path: Path
) -> None:
    job = make_job(folder, parallel, on_nonfinite="skip", checkpoint_every=3, **train)
    done = drive(job, stage_pool, tmp_path)
    plain = Plain(job, tmp_path / "plain", range(STEPS), delayed=job.parallel.schedule == "pipedream-2bw")
    assert plain.skipped == [3, 4]
    assert done.losses == pytest.approx(plain.losses, abs=1e-9, rel=0)
    skipped = [e for e in read_rows(tmp_path / EVENTS) if e["event"] == "skipped"]
    assert [e["step"] for e in skipped] == plain.skipped
    assert skipped[0]["message"].startswith("the gradient norm is nan, the training loss ")
    assert skipped[1]["message"] == "the training loss is nan"
    plain.check(done.checkpoints[STEPS])
    assert sorted(done.checkpoints) == [3, 6]  # step 3 made no update, and its checkpoint is as good as any


@pytest.mark.parametrize(
    ("parallel", "every", "used"),
    [
        ({}, 2, [0, 1, 4, 5, 6, 7]),  # back to step 2 from step 3, then again from what is mini-batch 3
        ({"schedule": "pipedream-2bw"}, 0, [4, 5, 6, 7, 8, 9]),  # back to the start
        *exhaustive(({"replicas": 2, "shard": "zero3"}, 1, [0, 1, 4, 5, 6, 7])),
    ],
    ids=["1f1b", "2bw", "zero3"],
)
def test_a_run_that_rewinds_goes_on_with_the_data_after_that(
    parallel: dict[str, Any], every: int, used: list[int], folder: Path, stage_pool, tmp_path: Path
) -> None:
    job = make_job(folder, parallel, on_nonfinite="rewind", checkpoint_every=every)
    done = drive(job, stage_pool, tmp_path / "run")
    plain = Plain(job, tmp_path / "plain", used, delayed=job.parallel.schedule == "pipedream-2bw")
    assert plain.skipped == []
    assert done.losses == pytest.approx(plain.losses, abs=1e-9, rel=0)
    assert [row["step"] for row in done.rows] == list(range(1, STEPS + 1))
    plain.check(done.checkpoints[STEPS])
    rewound = [e for e in read_rows(tmp_path / "run" / EVENTS) if e["event"] == "rewound"]
    assert sum(e["left_out"] for e in rewound) == used[-1] + 1 - STEPS
    if every == 2:  # what is left out stays so in a run that goes on from a checkpoint after it
        again = drive(job, stage_pool, tmp_path / "again", done.checkpoints[4], 4)
        assert again.losses == done.losses[4:]


def test_what_never_trains_stops(stage_pool, tmp_path: Path) -> None:
    """All the data are bad: neither way goes on for ever, and nothing of it is in a checkpoint."""
    write(tmp_path, np.full((200, 5), np.inf), np.zeros(200, dtype=np.int64))
    for way, count in (("skip", 20), ("rewind", 3)):
        job = make_job(tmp_path, {}, on_nonfinite=way, steps=24)
        with pytest.raises(DivergenceError, match=f"after {count} .* in a row"):
            drive(job, stage_pool, tmp_path / way)
        assert list((tmp_path / way / "checkpoints").glob("*")) == []
