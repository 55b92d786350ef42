"""Validation is a plain evaluation of the same parameters, and it leaves training alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from raypipe.checkpoint import open_checkpoint
from raypipe.data import Corpus
from raypipe.job.spec import JobSpec
from raypipe.models import GptLayers
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job

EVERY = {"steps": 3, "eval_every": 1, "eval_batches": 2, "checkpoint_every": 1}


def plain_validation(job: JobSpec, data: Path, checkpoint: Path) -> float:
    """Mean token loss of the held-out batches, without dropout, by PyTorch alone."""
    plan = GptLayers(job.model, torch.float64)
    model = torch.nn.Sequential(*(plan.build(i, 0) for i in range(plan.count))).eval()
    saved = open_checkpoint(checkpoint)
    values = saved.read(k for k in saved.keys if k.startswith("param/"))
    state = {key.removeprefix("param/"): value for key, value in values.items()}
    state[f"{plan.count - 1}.project.weight"] = state["0.token.weight"]  # tied
    model.load_state_dict(state)
    corpus = Corpus.open(data)
    losses = []
    with torch.no_grad():
        for batch in range(job.train.eval_batches):
            tokens, targets = corpus.batch("val", job.train.seed, batch, job.train.batch)
            losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item())
    return sum(losses) / len(losses)


PLANS = [
    *exhaustive({"schedule": "1f1b", "stages": 2}),
    {"schedule": "chimera", "stages": 4},
    {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2},
]


@pytest.mark.runs
@pytest.mark.parametrize("parallel", PLANS, ids=lambda p: p["schedule"])
def test_validation_loss_is_a_plain_evaluation(parallel, stage_pool, text_folder, tmp_path) -> None:
    job = small_job(text_folder, parallel, **EVERY)
    done = drive(job, stage_pool, tmp_path)
    plain = [plain_validation(job, tmp_path / "data", done.checkpoints[step]) for step in (1, 2, 3)]
    assert done.val_losses == pytest.approx(plain, abs=1e-9, rel=0)
    assert plain[0] != plain[2]  # it is the trained parameters that are judged


@pytest.mark.runs
def test_training_goes_the_same_way_with_and_without_validation(stage_pool, text_folder, tmp_path) -> None:
    with_it, without = (
        drive(
            small_job(text_folder, {"schedule": "1f1b", "stages": 2}, **EVERY | {"eval_every": every}, clip=0.5),
            stage_pool, tmp_path / str(every),
        )
        for every in (1, 0)
    )  # fmt: skip
    assert with_it.losses == without.losses  # dropout's keys know nothing of validation
    assert len(with_it.val_losses) == 3
    assert len(without.val_losses) == 1  # the one at the end
    assert with_it.val_losses[-1] == without.val_losses[-1]
