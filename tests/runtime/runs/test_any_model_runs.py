"""Captured models through real stage actors, whole or partly frozen: the loss curves of an eager loop."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raypipe.checkpoint import open_checkpoint
from raypipe.cost.profile import Reserved
from raypipe.errors import SpecError
from raypipe.job import JobSpec, load_cluster
from raypipe.partition.job_costs import job_profile
from raypipe.plan.choose import choose
from raypipe.plan.plan import Plan
from raypipe.train import make_plan
from tests.capture.models import FAMILIES
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import eager_training
from tests.runtime.runs.small_runs import drive, job_for

pytest.importorskip("transformers")
WIDE = {"vocab_size": 257}


make_job = partial(job_for, clip=0.5)


def loss_of_logits(module: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's own mean."""
    labels = rows.pop("shift_labels", rows.pop("labels", None))
    output = module(*rows.values()) if len(rows) == 1 else module(**rows)
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, -2), labels.flatten())


def eager_losses(job: JobSpec, data: Path) -> tuple[list[float], torch.nn.Module]:
    return eager_training(job, data, loss_of_logits)


@pytest.mark.runs
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


@pytest.mark.runs
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


@pytest.mark.runs
def test_a_llama_whose_sequences_fit_in_slices_alone(stage_pool, text_folder, tmp_path) -> None:
    """No plan of whole micro-batches fits; the one that the planner finds instead trains as the eager model does."""
    config = {**FAMILIES["llama"], **WIDE, "max_position_embeddings": 2048}
    model, text = {"hf": "llama", "config": config, "sequence": 2048}, {"type": "bytes", "path": str(text_folder)}
    wanted = {"auto": True, "microbatch": 1, "stages": 2, "replicas": 1, "tensor": 1, "shard": "none"}
    sizes = {"batch": 2, "steps": 2}
    job = make_job(model, text, wanted, **sizes)
    described = job_profile(job, load_cluster(Path("cluster/devices/h100.yaml")))
    small = described.model_copy(update={"memory_bytes": 15e6, "base_bytes": 0.0, "reserved": Reserved()})
    with pytest.raises(SpecError, match="no plan fits"):
        choose(make_job(model, text, {**wanted, "slices": 1}, **sizes), small, 2, search_s=0)
    plan = choose(job, small, 2, search_s=0).plan
    assert plan.parallel.slices == 2
    job = job.model_copy(update={"parallel": plan.parallel})
    done = drive(job, stage_pool, tmp_path / "run", plan=plan)
    losses, _ = eager_losses(job, tmp_path / "run" / "data")
    assert done.losses == pytest.approx(losses, abs=1e-9, rel=0)


@pytest.mark.runs
def test_t5_with_two_stages_a_device(stage_pool, text_folder, tmp_path) -> None:
    """The encoder's output and the position bias are passed along; the decoder reads its own tokens from the data."""
    config = {**FAMILIES["t5"], **WIDE}
    parallel = {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2}
    job = make_job(
        {"hf": "t5", "config": config, "sequence": 12}, {"type": "bytes", "path": str(text_folder)}, parallel
    )
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(eager_losses(job, tmp_path / "data")[0], abs=1e-9, rel=0)


@pytest.mark.runs
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


# Stages without a trained parameter through real stage actors: what they run, and the losses of plain PyTorch.

transformers = pytest.importorskip("transformers")
HERE = "tests.runtime.runs.test_any_model_runs"
BLOCKS = 6
CONFIG = {
    "n_layer": BLOCKS, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 257, "embd_pdrop": 0.0,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip


def partly_frozen_gpt(trained: list[int]) -> nn.Module:
    """A GPT-2 of which some blocks and the head train."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG))
    model.requires_grad_(False)
    for i in trained:
        model.transformer.h[i].requires_grad_(True)
    model.lm_head.requires_grad_(True)
    return model


def job_with(text: Any, trained: list[int], parallel: dict[str, Any], **train: Any) -> Any:
    model = {"import": f"{HERE}:partly_frozen_gpt", "args": {"trained": trained}, "sequence": 16}
    return make_job(model, {"type": "bytes", "path": str(text)}, parallel, lr=0.001, **train)


HALF = list(range(BLOCKS // 2, BLOCKS))
SCHEDULES = [
    ({"schedule": "1f1b", "stages": 4}, HALF),
    ({"schedule": "zb-v", "stages": 2}, HALF),
    ({"schedule": "zeropp", "stages": 2, "chunks": 2, "replicas": 2, "shard": "zero3"}, HALF),
    ({"schedule": "auto", "stages": 3}, [1, 5]),
    *exhaustive(
        ({"schedule": "chimera", "stages": 4}, HALF),
        ({"schedule": "modulo", "stages": 3, "chunks": 2}, [2, 5]),
        ({"schedule": "zb-h1", "stages": 4}, HALF),
        ({"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2}, HALF),
        ({"schedule": "1f1b", "stages": 4}, [5]),
        ({"schedule": "zb-h1", "stages": 3, "recompute": "full"}, [0, 5]),
        ({"schedule": "1f1b", "stages": 3, "replicas": 2, "sync": "prioritised"}, HALF),
    ),
]


@pytest.mark.runs
@pytest.mark.parametrize(("parallel", "trained"), SCHEDULES)
def test_losses_are_those_of_plain_pytorch(parallel, trained, stage_pool, text_folder, tmp_path) -> None:
    clips = "sync" not in parallel
    job = job_with(text_folder, trained, {"microbatch": 1, **parallel}, clip=0.5 if clips else None)
    plan = make_plan(job)
    assert plan.frozen
    done = drive(job, stage_pool, tmp_path, plan=plan)
    plain = job_with(text_folder, trained, {}, clip=0.5 if clips else 1e9)
    expected, _ = eager_losses(plain, tmp_path / "data")
    assert done.losses == pytest.approx(expected, abs=1e-9, rel=0)
    assert expected[-1] != expected[0]
    schedule = done.driver.schedule
    first = next(s for s in range(schedule.stages) if s not in plan.frozen)
    tasks = Counter((t.kind, t.stage) for t in schedule.tasks() if t.mbs)
    assert not [key for key in tasks if key[0] in ("W", "BW") and key[1] in plan.frozen]
    assert not [key for key in tasks if key[0] != "F" and key[1] < first]
    assert all(tasks["F", s] for s in range(schedule.stages))


@pytest.mark.runs
@pytest.mark.parametrize("schedule", ["pipedream-2bw", *exhaustive("pipedream")])
def test_asynchronous_steps_are_those_of_the_plan_with_all_its_tasks(
    schedule, stage_pool, text_folder, tmp_path
) -> None:  # fmt: skip
    """Which has a BW on every stage and runs as it did before there were frozen stages."""
    job = job_with(text_folder, HALF, {"schedule": schedule, "stages": 3}, clip=None)
    plan = make_plan(job)
    assert plan.frozen == (0,)
    less = drive(job, stage_pool, tmp_path / "less", plan=plan)
    every = Plan.of(plan.parallel, plan.cut, job.train.batch)
    whole = drive(job, stage_pool, tmp_path / "whole", plan=every)
    assert less.losses == pytest.approx(whole.losses, abs=1e-9, rel=0)
    assert less.losses[-1] != less.losses[0]


@pytest.mark.runs
def test_a_plan_that_freezes_what_trains_is_refused(stage_pool, text_folder, tmp_path) -> None:
    job = job_with(text_folder, HALF, {"schedule": "1f1b", "stages": 3})
    plan = Plan.of(job.parallel, make_plan(job).cut, job.train.batch, frozen=(0, 1))
    with pytest.raises(SpecError, match=re.escape("stage 1 has parameters to train")):
        drive(job, stage_pool, tmp_path, plan=plan)
