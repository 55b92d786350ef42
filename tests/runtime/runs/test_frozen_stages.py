"""Stages without a trained parameter through real stage actors: what they run, and the losses of plain PyTorch."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from torch import nn

from raypipe.errors import SpecError
from raypipe.plan.plan import Plan
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive
from tests.runtime.runs.test_any_model_runs import eager_losses, make_job

transformers = pytest.importorskip("transformers")
HERE = "tests.runtime.runs.test_frozen_stages"
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
