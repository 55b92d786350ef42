"""Runs whose encoder fills gaps of what reads it: one process's losses, float64, and checkpoints under other plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.two_towers import pairs
from raypipe.errors import SpecError
from raypipe.launch.plans import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import eager_training
from tests.runtime.runs.small_runs import drive
from tests.runtime.runs.test_any_model_runs import make_job

ENCODER = {"schedule": "auto", "placement": "encoder", "stages": 2, "microbatch": 4}
SIZES = {
    "text": {"width": 16, "layers": 3, "heads": 2, "vocabulary": 257, "length": 16},
    "image": {"width": 16, "layers": 3, "heads": 2, "side": 32, "patch": 8},
}


def model_of(frozen: bool) -> dict[str, Any]:
    return {"import": "jobs.two_towers:captions", "loss": "model", "args": {**SIZES, "frozen": frozen}}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    np.savez(tmp_path / "pairs.npz", **pairs(40))
    return {"type": "arrays", "path": str(tmp_path / "pairs.npz")}


def test_each_device_has_a_stage_of_the_encoder(data) -> None:
    """Only what is behind the encoder has a backward where that is frozen, from its first trained layer on."""
    for frozen in (False, True):
        plan = make_plan(make_job(model_of(frozen), data, ENCODER, lr=0.001))
        step = plan.one_copy()
        assert step.placement == ((0, 1, 0, 1),)
        assert plan.frozen == ((0,) if frozen else ()), "the projection is trained, and ends the encoder"
        kinds = {task.kind for task in step.tasks() if task.stage == 0}
        assert kinds == ({"F", "U"} if frozen else {"F", "B", "W", "U"})


@pytest.mark.parametrize(
    ("model", "stages", "why"),
    [
        (model_of(False), 9, "9 devices for an encoder of"),
        (
            {"hf": "gpt2", "config": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16}, "sequence": 12},
            2,
            "has no parameters",
        ),
    ],
    ids=["too short", "none"],
)
def test_a_model_without_enough_of_an_encoder_is_refused(model, stages, why, data, text_folder) -> None:
    text = {"type": "bytes", "path": str(text_folder)}
    job = make_job(model, text if "hf" in model else data, {**ENCODER, "stages": stages}, lr=0.001)
    with pytest.raises(SpecError, match=why):
        make_plan(job)


@pytest.mark.runs
@pytest.mark.parametrize("frozen", [True, *exhaustive(False)], ids=["frozen", "trained"])
def test_a_run_is_resumed_by_another_plan_and_back(frozen, data, stage_pool, tmp_path) -> None:
    losses: list[float] = []
    checkpoint, done = None, 0
    for parallel, until in (
        (ENCODER, 2),
        ({"schedule": "1f1b", "stages": 2, "microbatch": 4}, 3),
        ({**ENCODER, "stages": 1, "replicas": 2, "microbatch": 2}, 4),
    ):
        job = make_job(model_of(frozen), data, parallel, lr=0.001, checkpoint_every=1)
        job = job.model_copy(update={"train": job.train.model_copy(update={"steps": until})})
        run = drive(job, stage_pool, tmp_path / str(until), checkpoint, done)
        losses += run.losses
        checkpoint, done = run.checkpoints[until], until
    expected, _ = eager_training(job, tmp_path / "4" / "data", lambda module, rows: module(**rows)["loss"], 2)
    assert losses == pytest.approx(expected, abs=1e-9, rel=0)
