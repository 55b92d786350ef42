"""A row with too few or too many image tokens is one error, before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raypipe.data import declared_fields
from raypipe.errors import SpecError
from raypipe.graph.values.placeholders import Placeholder
from raypipe.job import JobSpec
from raypipe.job.spec import job_from
from raypipe.models import build_model
from raypipe.train import prepare_run

IMAGE = 39


def job_of(path: Path, ids: np.ndarray, ragged: bool = False) -> JobSpec:
    draw = np.random.default_rng(0)
    rows = {"patches": draw.normal(size=(len(ids), 3, 6)), "labels": ids, "input_ids": ids}
    if ragged:
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        for name in ("labels", "input_ids"):
            rows |= {name: ids.reshape(-1), f"{name}.offsets": offsets}
    np.savez(path / "rows.npz", **rows)
    return job_from(
        {
            "name": "images", "model": {"import": "tests.zoo.odd_modules:ImageTokens", "task": "causal-lm"},
            "data": {"type": "arrays", "path": str(path / "rows.npz")}, "train": {"steps": 1, "batch": 2},
            "parallel": {"schedule": "1f1b", "stages": 1, "microbatch": 1},
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_each_row_has_as_many_image_tokens_as_its_image_has_features(ragged, tmp_path) -> None:
    ids = np.random.default_rng(1).integers(3, 30, (12, 8))
    ids[:, 2:5] = IMAGE
    job = job_of(tmp_path, ids, ragged)
    assert build_model(job, declared_fields(job.data)).placeholders == (Placeholder("input_ids", IMAGE, 3),)
    prepare_run(job, tmp_path / "good", resume=False, say=lambda _: None)
    for column, found in ((5, 4), (2, 2)):
        wrong = ids.copy()
        wrong[7, column] = IMAGE if found == 4 else 3
        words = rf"has {found} times token {IMAGE} in input_ids, and its image has 3 features"
        with pytest.raises(SpecError, match=words):
            prepare_run(job_of(tmp_path, wrong, ragged), tmp_path / f"bad {found}", resume=False, say=lambda _: None)
