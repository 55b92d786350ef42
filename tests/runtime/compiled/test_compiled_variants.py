"""Compiled stages with weight versions, divided weights, validation and ``auto``: the losses of the same eager run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.compiled.toolchain import missing_toolchain
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job

SMALL = {"layers": 2, "tie_embeddings": False}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two versions of weights": ({"schedule": "pipedream-2bw", "stages": 2}, {"optimizer": "sgd", "eval_every": 2}),
    "a version per micro-batch": ({"schedule": "pipedream", "stages": 2}, {"optimizer": "sgd"}),
    "divided gradients": ({"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero2"}, {"clip": 0.5}),
    "divided weights": ({"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero3"}, {"clip": 0.5}),
    "auto": ({"schedule": "1f1b", "stages": 2}, {"compile": "auto", "steps": 16}),
}


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))
@pytest.mark.parametrize("name", exhaustive(*VARIANTS))
def test_losses_and_validation_are_those_of_the_eager_run(name: str, stage_pool, text_folder, tmp_path: Path) -> None:
    parallel, train = VARIANTS[name]
    compiled = {"compile": "inductor", "compile_first": True}
    eager = drive(small_job(text_folder, parallel, SMALL, lr=0.001, **{**train, "compile": "none"}),
                  stage_pool, tmp_path / "eager")  # fmt: skip
    done = drive(small_job(text_folder, parallel, SMALL, lr=0.001, **{**compiled, **train}),
                 stage_pool, tmp_path / "compiled")  # fmt: skip
    rows = read_rows(tmp_path / "compiled" / EVENTS)
    reasons = [row["reason"] for row in rows if row["event"] == "compiled"]
    assert reasons[:2] == [None, None]
    if name == "auto":  # five eager steps, the swap, five compiled ones
        assert [row["step"] > 5 for row in rows if row["event"] == "swapped"] == [True]
    assert done.losses == pytest.approx(eager.losses, abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx(eager.val_losses, abs=1e-9, rel=0)
