"""Captured models through real stage actors: loss curves of an eager loop, checkpoints read by another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from raypipe.checkpoint import open_checkpoint
from raypipe.data import known_fields, open_data
from raypipe.errors import SpecError
from raypipe.job import JobSpec, load_cluster
from raypipe.job.spec import job_from
from raypipe.models import build_model
from raypipe.partition.job_costs import job_profile
from raypipe.plan.choose import choose
from tests.capture.models import FAMILIES
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import keyed, with_values
from tests.runtime.runs.small_runs import drive

pytest.importorskip("transformers")
pytestmark = pytest.mark.runs
WIDE = {"vocab_size": 257}


def make_job(model: dict[str, Any], data: dict[str, Any], parallel: dict[str, Any], **train: Any) -> JobSpec:
    return job_from(
        {
            "name": "any", "model": model, "data": data,
            "train": {"steps": 4, "batch": 8, "lr": 0.01, "clip": 0.5, "seed": 3, "dtype": "float64",
                      "eval_batches": 1, **train},
            "parallel": {"microbatch": 2, **parallel},
        }
    )  # fmt: skip


def eager_losses(job: JobSpec, data: Path) -> tuple[list[float], torch.nn.Module]:
    """AdamW on the whole eager model, the whole mini-batch at a time; PyTorch's own mean, clipping and optimizer."""
    model = build_model(job, known_fields(data))
    body = model.build_stage(range(model.count), job.train.seed)
    module = with_values(model.values.build(), {n: p.detach() for n, p in body.named().items()})
    wanted = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=job.train.lr, weight_decay=job.train.weight_decay)
    dataset = open_data(data, model.task)
    losses = []
    for step in range(job.train.steps):
        rows = dataset.batch("train", job.train.seed, step, job.train.batch)
        rows = {name: t.double() if t.is_floating_point() else t for name, t in rows.items()}
        labels = rows.pop("shift_labels", rows.pop("labels", None))
        with keyed(job.train.seed, step, job.train.batch):
            output = module(*rows.values()) if len(rows) == 1 else module(**rows)
        output = getattr(output, "logits", output)
        loss = F.cross_entropy(output.flatten(0, -2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wanted, job.train.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, module


def test_gpt2_with_split_backward_tied_embeddings_and_dropout(stage_pool, text_folder, tmp_path) -> None:
    text = {"type": "bytes", "path": str(text_folder)}
    model = {"hf": "gpt2", "config": {**FAMILIES["gpt2"], **WIDE}, "sequence": 16}
    job = make_job(model, text, {"schedule": "zb-h1", "stages": 2}, checkpoint_every=2)
    done = drive(job, stage_pool, tmp_path / "run")
    losses, module = eager_losses(job, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)
    # Every parameter is saved once under its own name, and is the eager one.
    saved = open_checkpoint(done.checkpoints[4])
    names = {name for name, _ in module.named_parameters()}
    assert {key.removeprefix("param/") for key in saved.keys if key.startswith("param/")} == names
    for name, parameter in module.named_parameters():
        worst = float((saved.read([f"param/{name}"])[f"param/{name}"] - parameter.detach()).abs().max())
        assert worst < 1e-8, name
    # Another plan goes on from the middle: three stages, joint backward, replicas of each.
    other = make_job(model, text, {"schedule": "1f1b", "stages": 2, "replicas": 2})
    rest = drive(other, stage_pool, tmp_path / "rest", done.checkpoints[2], 2)
    assert rest.losses == pytest.approx(losses[2:], abs=1e-9, rel=0)
    assert rest.val_losses == pytest.approx(done.val_losses, abs=1e-9, rel=0)


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("gpt2", {"schedule": "zb-h1", "stages": 2, "slices": 4}),
        *exhaustive(("llama", {"schedule": "1f1b", "stages": 2, "slices": 2, "replicas": 2})),
    ],
)
def test_captured_models_in_slices(family, parallel, stage_pool, text_folder, tmp_path) -> None:
    """Tied embeddings, dropout, also of attention's weights, positions that count or rotate, keys that heads share."""
    config = {**FAMILIES[family], **WIDE}
    model = {"hf": family, "config": config, "sequence": 16}
    job = make_job(model, {"type": "bytes", "path": str(text_folder)}, parallel)
    done = drive(job, stage_pool, tmp_path / "run")
    losses, _ = eager_losses(job, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)


def test_a_llama_whose_sequences_fit_in_slices_alone(stage_pool, text_folder, tmp_path) -> None:
    """No plan of whole micro-batches fits; the one that the planner finds instead trains as the eager model does."""
    config = {**FAMILIES["llama"], **WIDE, "max_position_embeddings": 2048}
    model, text = {"hf": "llama", "config": config, "sequence": 2048}, {"type": "bytes", "path": str(text_folder)}
    wanted = {"auto": True, "microbatch": 1, "stages": 2, "replicas": 1, "tensor": 1, "shard": "none"}
    sizes = {"batch": 2, "steps": 2}
    job = make_job(model, text, wanted, **sizes)
    described = job_profile(job, load_cluster(Path("cluster/devices/h100.yaml")))
    small = described.model_copy(update={"memory_bytes": 15e6, "base_bytes": 0.0})
    with pytest.raises(SpecError, match="no plan fits"):
        choose(make_job(model, text, {**wanted, "slices": 1}, **sizes), small, 2, search_s=0)
    plan = choose(job, small, 2, search_s=0).plan
    assert plan.parallel.slices == 2
    job = job.model_copy(update={"parallel": plan.parallel})
    done = drive(job, stage_pool, tmp_path / "run", plan=plan)
    losses, _ = eager_losses(job, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)


def test_t5_with_two_stages_a_device(stage_pool, text_folder, tmp_path) -> None:
    """The encoder's output and the position bias are passed along; the decoder reads its own tokens from the data."""
    config = {**FAMILIES["t5"], **WIDE}
    parallel = {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2}
    job = make_job(
        {"hf": "t5", "config": config, "sequence": 12}, {"type": "bytes", "path": str(text_folder)}, parallel
    )
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(eager_losses(job, tmp_path / "data")[0], abs=1e-9, rel=0)


def test_arrays_and_a_frozen_stage(stage_pool, tmp_path) -> None:
    """No gradient travels to a stage in which nothing is trained."""
    draw = np.random.default_rng(0)
    file = tmp_path / "rows.npz"
    labels = draw.integers(0, 3, 40)
    np.savez(file, features=draw.normal(size=(40, 5)) + labels[:, None], labels=labels)
    model = {"import": "tests.runtime.runs.test_any_model:half_frozen", "args": {"inside": 5}}
    job = make_job(model, {"type": "arrays", "path": str(file)}, {"schedule": "1f1b", "stages": 3})
    done = drive(job, stage_pool, tmp_path / "run")
    losses, module = eager_losses(job, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)
    saved = open_checkpoint(done.checkpoints[4])
    assert torch.equal(saved.read(["param/0.weight"])["param/0.weight"], module[0].weight)
