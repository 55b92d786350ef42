"""Sequences that copies divide, with real actors: the losses of one device; checkpoints for any number of copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.checkpoint import open_checkpoint
from raypipe.job.spec import JobSpec
from tests.capture.models import FAMILIES
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, job_for

pytest.importorskip("transformers")


def job_of(family: str, text: Path, parallel: dict[str, Any], **train: Any) -> JobSpec:
    config = {**FAMILIES[family], "vocab_size": 257}
    model = {"hf": family, "config": config, "sequence": 16}
    return job_for(model, text, {"microbatch": 2, **parallel}, **{"clip": 0.5, "checkpoint_every": 2, **train})


CASES = [
    ("llama", {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2}),
    *exhaustive(
        ("llama", {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2, "vocabulary": "split"}),
        ("gpt2", {"schedule": "zb-h1", "stages": 2, "replicas": 2, "context": 2, "recompute": "full"}),
        ("gpt2", {"schedule": "chimera", "stages": 2, "replicas": 4, "context": 2}),
        ("qwen3", {"schedule": "1f1b", "stages": 1, "replicas": 8, "context": 4, "shard": "zero1"}),
        ("llama", {"schedule": "1f1b", "stages": 1, "replicas": 2, "context": 2, "tensor": 2}),
        ("llama", {"schedule": "1f1b", "stages": 2, "replicas": 4, "context": 4}),
    ),
]


@pytest.mark.runs
@pytest.mark.parametrize(("family", "parallel"), CASES)
def test_captured_models(family, parallel, stage_pool, text_folder, tmp_path) -> None:
    """Positions that count or rotate, dropout also of attention's weights, keys that heads share; then other copies."""
    alone = drive(job_of(family, text_folder, {}), stage_pool, tmp_path / "alone")
    done = drive(job_of(family, text_folder, parallel), stage_pool, tmp_path / "divided")
    assert done.losses == pytest.approx(alone.losses, abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx(alone.val_losses, abs=1e-9, rel=0)
    assert [row["tokens_per_s"] * row["step_s"] for row in done.rows] == pytest.approx([8 * 16] * 4)
    saved, expected = (open_checkpoint(run.checkpoints[4]) for run in (done, alone))
    assert saved.keys == expected.keys
    values = expected.read(expected.keys)
    for key, value in saved.read(saved.keys).items():
        torch.testing.assert_close(value, values[key], rtol=0, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")
    rest = drive(job_of(family, text_folder, {"stages": 2}), stage_pool, tmp_path / "whole", done.checkpoints[2], 2)
    assert rest.losses == pytest.approx(alone.losses[2:], abs=1e-9, rel=0)
    again = drive(job_of(family, text_folder, parallel), stage_pool, tmp_path / "again", alone.checkpoints[2], 2)
    assert again.losses == pytest.approx(alone.losses[2:], abs=1e-9, rel=0)
