"""What is not finite reaches no checkpoint, wherever it turns up first: loss, gradient, parameter, validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.errors import DivergenceError
from raypipe.job import JobSpec
from raypipe.observe.run_log import METRICS
from raypipe.runtime.state.state import TensorPiece, not_finite
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, job_for

MODELS = "tests.runtime.runs.diverging_models"
SGD = {"optimizer": "sgd", "lr": 0.2, "weight_decay": 0.0, "lr_schedule": "constant"}


def make_job(folder: Path, build: str, parallel: dict[str, Any], scale: float = 1.0, **train: Any) -> JobSpec:
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    labels = draw.integers(1, 3, 40)
    np.savez(folder / "rows.npz", features=scale * (draw.normal(size=(40, 5)) + labels[:, None]), labels=labels)
    train = {"steps": 40, "dtype": "float32", "checkpoint_every": 1, **SGD, **train}
    parallel = {"schedule": "1f1b", "stages": 2, **parallel}
    return job_for({"import": f"{MODELS}:{build}"}, folder / "rows.npz", parallel, **train)


def strict_rows(path: Path) -> list[dict[str, Any]]:
    def no_json(word: str) -> None:
        raise AssertionError(f"{word} in {path}")

    return [json.loads(line, parse_constant=no_json) for line in path.read_text().splitlines()]


def diverged(job: JobSpec, pool: Any, directory: Path) -> tuple[int, DivergenceError]:
    """Run until it diverges: the step, and the error. Nothing that is committed or logged shows any of it."""
    with pytest.raises(DivergenceError) as caught:
        drive(job, pool, directory)
    error = caught.value
    strict_rows(directory / METRICS)
    for path in (directory / "checkpoints").glob("step-*"):
        open_checkpoint(path)  # what is left is whole
        for shard in path.glob("*.safetensors"):
            for key, tensor in load_file(shard).items():
                assert bool(torch.isfinite(tensor).all()), f"{path.name} holds {key} that is not finite"
    return int(error.where.removeprefix("step ")), error


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({"replicas": 2}, {"clip": 1.0}),
        ({"schedule": "zb-h2", "update": "optimistic"}, {"clip": 10.0}),
        ({"schedule": "pipedream", "microbatch": 4}, {"clip": None}),
        *exhaustive(
            ({}, {"clip": None, "dtype": "bfloat16"}),
            ({}, {"clip": None}),
            ({"update": "optimistic"}, {"clip": 10.0}),
            ({"schedule": "chimera", "update": "optimistic"}, {"clip": 10.0}),
            ({"wire_dtype": "float16"}, {"clip": 1.0}),
            ({"schedule": "pipedream-2bw"}, {"clip": 1.0}),
        ),
    ],
    ids=["replicas", "zb-h2", "pipedream", "bfloat16", "no clip", "optimistic", "chimera", "float16 wire", "2bw"],
)
def test_a_gradient_that_is_no_number_ends_the_run_before_its_checkpoint(
    parallel: dict[str, Any], train: dict[str, Any], stage_pool, tmp_path: Path
) -> None:
    job = make_job(tmp_path, "countdown", parallel, **train)
    step, error = diverged(job, stage_pool, tmp_path / "run")
    assert 2 <= step < 40
    if job.parallel.schedule == "pipedream":  # the step's next micro-batch has run on what the first one made
        assert error.why == "the training loss is nan"
    else:
        assert error.why.startswith("the gradient norm is nan, the training loss ")
        assert "nan" not in error.why.split("loss")[1]
    newest, notices = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert (open_checkpoint(newest).step, notices) == (step - 1, [])
    assert f"--resume then continues from step {step - 1} ({newest})" in error.fix
    assert [row["step"] for row in strict_rows(tmp_path / "run" / METRICS)] == list(range(1, step))


@pytest.mark.runs
def test_the_last_step_does_not_end_well_with_such_a_gradient(stage_pool, tmp_path: Path) -> None:
    step, _ = diverged(make_job(tmp_path, "countdown", {}, clip=None), stage_pool, tmp_path / "long")
    last = make_job(tmp_path, "countdown", {}, clip=None, steps=step, checkpoint_every=0)
    again, error = diverged(last, stage_pool, tmp_path / "short")
    assert again == step
    assert "there is no earlier checkpoint" in error.fix
    assert list((tmp_path / "short" / "checkpoints").glob("*")) == []


@pytest.mark.runs
def test_parameters_that_an_update_makes_infinite_are_not_committed(stage_pool, tmp_path: Path) -> None:
    """Loss and gradients of the step are finite; its learning rate is too large for what float32 holds."""
    job = make_job(tmp_path, "linear", {}, scale=1e3, lr=1e38, clip=None)
    step, error = diverged(job, stage_pool, tmp_path / "run")
    assert step == 1
    assert "is not finite after the update" in error.why


def test_what_is_not_finite_is_found_in_every_dtype_and_frozen_masks_are_left_alone() -> None:
    class Held:
        named = dict.fromkeys(("0.weight", "0.mask"))
        trained = dict.fromkeys(("0.weight",))

    def found(**values: Tensor) -> str | None:
        return not_finite(Held(), [TensorPiece(key.replace("__", "/"), value, None) for key, value in values.items()])  # type: ignore[arg-type]

    big = torch.full((40,), 60000.0, dtype=torch.float16)  # finite, though the norm of it is not
    far = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)  # finite, though their distance is not
    assert found(far=far) is None
    assert found(a=big, b=torch.ones(3, dtype=torch.int64), c=torch.ones(0), d=torch.tensor(1.0)) is None
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for bad in (float("nan"), float("inf"), -float("inf")):
            assert found(a=big, x=torch.tensor([1.0, bad], dtype=dtype), z=torch.ones(2, dtype=dtype)) == "x"
    mask = torch.tensor([0.0, -float("inf")])
    pieces = [TensorPiece("param/0.mask", mask, None), TensorPiece("optim/0.mask/previous", mask, None)]
    assert not_finite(Held(), pieces) is None  # type: ignore[arg-type]
    assert not_finite(Held(), [TensorPiece("param/0.weight", mask, None)]) == "param/0.weight"  # type: ignore[arg-type]
