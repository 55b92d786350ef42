"""Batch norm that learns, against plain PyTorch that accumulates gradients over the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.checkpoint import Checkpoint, open_checkpoint
from raypipe.errors import CaptureError, RaypipeError
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.profiling import profile_and_plan
from raypipe.train import prepare_run
from tests.capture.models import Residual
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import as_started, assert_step_of, eager_training
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.small_runs import Done, drive, job_for
from tests.runtime.runs.test_any_model import fields_of

HERE = "tests.runtime.runs.test_batch_norm"
BATCH, STEPS = 8, 4


class Net(nn.Module):
    """As people write it: in-place ReLUs and additions, a norm in every place, one that keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1))
        self.classify = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 3),
                                      nn.BatchNorm1d(3, track_running_stats=False))  # fmt: skip

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.blocks(self.stem(image)).mean((2, 3)))


class Other(nn.Module):
    """Two linear layers around what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm: nn.Module = nn.BatchNorm1d(6)
        self.kind = kind
        if kind == "moving":
            self.register_buffer("moving", torch.zeros(6))
        if kind == "cumulative":
            self.norm = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.kind == "read":
            x = x - self.norm.running_mean
        x = self.norm(x)
        if self.kind == "moving":
            self.moving.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        if self.kind == "twice":
            x = self.norm(x.relu())
        return self.last(x)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("images") / "rows.npz"
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 40)
    image = draw.normal(size=(40, 3, 8, 8)) * (1 + labels[:, None, None, None])
    np.savez(file, image=image, labels=labels)
    return file


def make_job(rows: Path, parallel: dict[str, Any], **train: Any) -> JobSpec:
    sgd = {"optimizer": "sgd", "lr": 0.05}
    return job_for(
        {"import": f"{HERE}:Net"}, rows, parallel, steps=STEPS, batch=BATCH, checkpoint_every=2, **sgd, **train
    )


class Plain:
    """Gradient accumulation as PyTorch's users write it."""

    def __init__(self, job: JobSpec, data: Path, microbatch: int = 2) -> None:
        def loss(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(module(rows["image"]), rows["labels"])

        self.losses, self.module = eager_training(job, data, loss, microbatch)
        rows = as_started(job, data)[1]("val", 0)
        self.module.eval()
        with torch.no_grad():
            # The norm without statistics sees whatever it is given at once, in evaluation too.
            pairs = zip(rows["image"].split(microbatch), rows["labels"].split(microbatch), strict=True)
            parts = [F.cross_entropy(self.module(x), y, reduction="sum") for x, y in pairs]
        self.val_loss = float(sum(parts)) / int((rows["labels"] != -100).sum())  # there are fewer held-out rows


def check(done: Done, plain: Plain) -> Checkpoint:
    assert done.losses == pytest.approx(plain.losses, abs=1e-9, rel=0)
    assert done.val_losses[-1] == pytest.approx(plain.val_loss, abs=1e-9, rel=0)
    saved = open_checkpoint(done.checkpoints[STEPS])
    state = {name: value for name, value in plain.module.named_buffers()}
    assert {k.removeprefix("buffer/") for k in saved.keys if k.startswith("buffer/")} == set(state)
    for name, value in state.items():
        mine = saved.read([f"buffer/{name}"])[f"buffer/{name}"]
        torch.testing.assert_close(mine, value, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        if name.endswith("num_batches_tracked"):
            assert int(value) == STEPS * BATCH / 2
    return saved


PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "stages": 2, "recompute": "full"},
    "chimera": {"schedule": "chimera", "stages": 2},
    "by layer": {"schedule": "1f1b", "stages": 1, "replicas": 2, "sync": "reverse-first-k", "first_k": 4},
    "zb-h1": {"schedule": "zb-h1", "stages": 2},
    "gpipe": {"schedule": "gpipe", "stages": 2},
    "replicas": {"schedule": "1f1b", "stages": 2, "replicas": 2},
    "branches": {"schedule": "auto", "placement": "branches", "stages": 2, "recompute": "full"},
}


@pytest.mark.runs
@pytest.mark.parametrize(
    "plans", [["by layer", "chimera", "1f1b", "branches"], *exhaustive(["zb-h1", "gpipe", "replicas"])], ids=str
)
def test_losses_statistics_and_evaluation_are_those_of_gradient_accumulation(plans, stage_pool, rows, tmp_path) -> None:
    """One process, and every plan: schedules, replicas, two directions; micro-batches of one step in any place."""
    plain: Plain | None = None
    for name in plans:
        job = make_job(rows, PLANS[name])
        done = drive(job, stage_pool, tmp_path / name)
        if plain is None:
            plain = Plain(job, tmp_path / name / "data")
        check(done, plain)
    # Another plan goes on from the middle of the last one.
    assert plain is not None
    rest = drive(make_job(rows, PLANS["zb-h1"]), stage_pool, tmp_path / "rest", done.checkpoints[2], 2)
    assert rest.losses == pytest.approx(plain.losses[2:], abs=1e-9, rel=0)
    assert rest.val_losses[-1] == pytest.approx(plain.val_loss, abs=1e-9, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [{}, {"recompute": True}, {"split": True}, {"pairs": True, "recompute": True}, {"recomputed": {0, 2}}],
    ids=str,
)
def test_running_a_forward_again_moves_nothing_twice(way: dict[str, Any], rows: Path) -> None:
    job = make_job(rows, {"schedule": "1f1b", "stages": 2})
    draw = torch.Generator().manual_seed(1)
    data = {"image": torch.randn(6, 3, 8, 8, generator=draw, dtype=torch.float64), "labels": torch.arange(6) % 3}
    model = build_model(job, fields_of(data))
    assert model.batch_statistics
    if "recomputed" in way:
        way = {"recompute": True, "finest": True, **way}
    outcome = run_step(model, even_cut(model, 2), data, torch.float64, 2, **way)
    parts = list(zip(data["image"].split(2), data["labels"].split(2), strict=True))
    module = assert_step_of(outcome, model, lambda net: sum(F.cross_entropy(net(x), y) / 3 for x, y in parts))
    held = {n: b for s in outcome.stages for one in s.statistics for n, b in one.buffers_by_name.items()}
    assert held.keys() == dict(module.named_buffers()).keys()
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(held[name], buffer, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
def test_who_leaves_the_size_of_micro_batches_to_the_planner_is_told(rows: Path, tmp_path, monkeypatch) -> None:
    class PlannedError(Exception):
        pass

    def stop(*_: object) -> None:
        raise PlannedError

    monkeypatch.setattr(profile_and_plan, "profile_and_plan", stop)
    for name, parallel in (("open", {"auto": True}), ("fixed", {"auto": True, "microbatch": 4})):
        job = make_job(rows, {})
        job = job.model_copy(update={"parallel": type(job.parallel).model_validate(parallel)})
        said: list[str] = []
        with pytest.raises(PlannedError):
            prepare_run(job, tmp_path / name, resume=False, say=said.append)
        assert sum("set parallel.microbatch to fix it" in text for text in said) == (name == "open")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("moving", "writes moving in every forward"),
        ("twice", "holds a batch norm with running statistics"),
        ("read", r"norm\.running_mean is also read elsewhere"),
        ("cumulative", "holds a batch norm with running statistics"),
    ],
)
def test_other_buffers_that_learn_are_refused_with_what_to_do(kind: str, why: str) -> None:
    data = {"x": torch.zeros(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}
    job = job_for({"import": f"{HERE}:Other", "args": {"kind": kind}}, "unused.npz", {}, batch=4, dtype="float32")
    with pytest.raises(CaptureError, match=why) as caught:
        build_model(job, fields_of(data))
    assert "batch_norm: frozen" in caught.value.fix or "GroupNorm" in caught.value.fix


def test_a_single_value_per_channel_has_no_variance(rows: Path) -> None:
    job = make_job(rows, {"schedule": "1f1b", "stages": 2, "microbatch": 1})
    data = {"image": torch.randn(2, 3, 8, 8, dtype=torch.float64), "labels": torch.tensor([0, 1])}
    model = build_model(job, fields_of(data))
    with pytest.raises(RaypipeError, match="one value per channel") as caught:
        run_step(model, even_cut(model, 2), data, torch.float64, 1)
    assert "microbatch" in str(caught.value)
