"""What cannot be combined with slices along the sequence is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import RaypipeError
from raypipe.models.layered import equal_slices
from raypipe.train import prepare_run
from tests.job_files import minimal_job

GPT = {"type": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence": 12, "vocabulary": 256}
SLICED = {"schedule": "1f1b", "stages": 2, "microbatch": 2, "slices": 4}


def job(text: Path, model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **parallel: Any) -> Any:
    return minimal_job(model or GPT, text, {**SLICED, **parallel}, **(train or {}))


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        ({"schedule": "chimera"}, {}, "chimera has no use for slices = 4"),
        ({"schedule": "auto"}, {}, "auto has no use for slices = 4"),
        ({"recompute": ["block.0"]}, {}, "recomputes all of its activations or none"),
        ({"recompute": "full", "keep": [0.5, 0.5]}, {}, "recomputes all of its activations or none"),
        ({"tensor": 2}, {}, "cannot be combined with tensor: 2"),
        ({"sync": "prioritised"}, {"clip": None}, "cannot be combined with sync: prioritised"),
        ({}, {"compile": "inductor"}, "run whole micro-batches"),
    ],
)
def test_keys_that_slices_exclude(parallel, train, says, tmp_path) -> None:
    with pytest.raises(RaypipeError, match=says):
        job(tmp_path, train=train, **parallel)


@pytest.mark.parametrize(
    ("model", "parallel", "train", "says"),
    [
        (None, {"slices": 5}, {}, "5 slices of a sequence of 12 would not be equally long"),
        ({"hf": "mamba", "config": {"num_hidden_layers": 1, "hidden_size": 16, "state_size": 4, "vocab_size": 256},
          "sequence": 12}, {}, {}, "cannot run in slices of a sequence"),
        (None, {}, {"metrics": "tests.job.test_slices:figures"}, "want them whole"),
    ],
)  # fmt: skip
def test_jobs_that_cannot_run_in_slices(model, parallel, train, says, text_folder, tmp_path) -> None:
    with pytest.raises(RaypipeError, match=says):
        prepare_run(job(text_folder, model, train, **parallel), tmp_path / "run", resume=False)


def figures(predictions: Any) -> dict[str, float]:
    return {}


def test_slices_are_equal() -> None:
    assert equal_slices(12, 4) == 3
    with pytest.raises(RaypipeError, match="use 4"):
        equal_slices(12, 5)
