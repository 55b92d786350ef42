"""Jobs cut as graphs of branches, through real stage actors: loss curves of an eager loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.two_towers import pairs
from raypipe.data import known_fields, open_data
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.models.own_loss import OwnLoss
from raypipe.plan.plan import build_schedule
from raypipe.schedule.ir import StageGraph
from tests.capture.models import FAMILIES
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.small_runs import drive
from tests.runtime.runs.test_any_model_runs import WIDE, eager_losses, make_job

pytest.importorskip("transformers")
pytestmark = pytest.mark.runs
BRANCHES = {"schedule": "auto", "placement": "branches", "stages": 2}
TOWERS = {
    "text": {"width": 16, "layers": 3, "heads": 2, "vocabulary": 257, "length": 16},
    "image": {"width": 16, "layers": 2, "heads": 2, "side": 32, "patch": 8}, "shared": 8,
}  # fmt: skip


def microbatch_losses(job: JobSpec, data: Path) -> list[float]:
    """The loss that the model returns for each micro-batch, averaged over those of a mini-batch, and AdamW."""
    model = build_model(job, known_fields(data))
    assert isinstance(model.task, OwnLoss)
    body = model.build_stage(range(model.count), job.train.seed)
    module = with_values(model.values.build(), {n: p.detach() for n, p in body.named().items()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=job.train.lr, weight_decay=job.train.weight_decay)
    dataset = open_data(data, model.task)
    losses = []
    for step in range(job.train.steps):
        rows = dataset.batch("train", job.train.seed, step, job.train.batch)
        rows = {name: t.double() if t.is_floating_point() else t for name, t in rows.items()}
        optimizer.zero_grad()
        size, total = job.parallel.microbatch, 0.0
        for first in range(0, job.train.batch, size):
            loss = module(**{n: t[first : first + size] for n, t in rows.items()})["loss"]
            (loss * size / job.train.batch).backward()
            total += loss.item() * size / job.train.batch
        torch.nn.utils.clip_grad_norm_(module.parameters(), job.train.clip)
        optimizer.step()
        losses.append(total)
    return losses


def test_two_towers_begin_together(stage_pool, tmp_path) -> None:
    """CLIP-shaped: neither tower waits for the other, and the loss compares the pairs of a micro-batch."""
    file = tmp_path / "pairs.npz"
    np.savez(file, **pairs(40))
    model = {"import": "jobs.two_towers:build", "loss": "model", "args": TOWERS}
    job = make_job(model, {"type": "arrays", "path": str(file)}, {**BRANCHES, "microbatch": 4}, lr=0.001)
    done = drive(job, stage_pool, tmp_path / "run")
    schedule = build_schedule(done.driver.running.plan, job.train.batch)
    starts = [s for s, inputs in enumerate(schedule.graph.inputs()) if not inputs]
    assert {schedule.placement[0][s] for s in starts} == {0, 1}, "each device has something to begin with"
    assert schedule.graph != StageGraph.chain(schedule.stages)
    assert done.losses == pytest.approx(microbatch_losses(job, tmp_path / "run" / "data"), abs=1e-9, rel=0)


def test_encoder_and_decoder_on_two_copies_of_two_devices(stage_pool, text_folder, tmp_path) -> None:
    """With dropout, whose draws have the numbers that the model's own order gives them, and tied embeddings."""
    model = {"hf": "t5", "config": {**FAMILIES["t5"], **WIDE}, "sequence": 12}
    parallel = {**BRANCHES, "replicas": 2}
    job = make_job(model, {"type": "bytes", "path": str(text_folder)}, parallel, lr=0.001)
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(eager_losses(job, tmp_path / "data")[0], abs=1e-9, rel=0)
