"""Preparing a job builds its model once and its schedule once, wherever the plan comes from; the run takes those."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.checkpoint import commit, step_directory, write_shard
from raypipe.errors import ClusterError
from raypipe.job import JobSpec, job_from
from raypipe.observe.run_dir import RECORD
from raypipe.train import execute, make_plan, prepare_run

COUNTED = {"build_model": "raypipe.models", "build_schedule": "raypipe.plan.plan"}
ONCE = {"build_model": 1, "build_schedule": 1}


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    return job_from({
        "name": "small", "model": {"layers": 4, "hidden": 16, "heads": 2, "sequence": 16},
        "data": {"path": str(tmp_path / "text.txt")}, "train": {"steps": 4, "batch": 8},
        "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
    })  # fmt: skip


@pytest.fixture
def calls(job: JobSpec, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of both functions, under every name that a module of raypipe has for them; Ray does not start."""
    import raypipe.runtime.cluster.connect as cluster

    counts: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            counts[name] += 1
            return original(*args, **options)

        return call

    def no_cluster(*_: object, **__: object) -> None:
        raise ClusterError("cluster", "is not there")

    for name, home in COUNTED.items():
        original = getattr(importlib.import_module(home), name)
        replacement = counted(name, original)
        for module in [m for key, m in sys.modules.items() if key.startswith("raypipe")]:
            if vars(module).get(name) is original:
                monkeypatch.setattr(module, name, replacement)
    monkeypatch.setattr(cluster, "connect", no_cluster)
    return counts


def go(job: JobSpec, directory: Path, resume: bool = False, plan_file: Path | None = None) -> None:
    """The whole command, up to where it connects to Ray."""
    prepared = prepare_run(job, directory, resume, plan_file)
    with pytest.raises(ClusterError, match="is not there"):
        execute(prepared, None, lambda: None)


def test_a_plan_made_as_asked(job: JobSpec, calls: Counter[str], tmp_path: Path) -> None:
    go(job, tmp_path / "run")
    assert calls == ONCE


def test_a_plan_in_a_file(job: JobSpec, calls: Counter[str], tmp_path: Path) -> None:
    make_plan(job).save(tmp_path / "plan.json")
    calls.clear()
    go(job, tmp_path / "run", plan_file=tmp_path / "plan.json")
    assert calls == ONCE


def test_a_plan_kept_from_the_run(job: JobSpec, calls: Counter[str], tmp_path: Path) -> None:
    searched = job.model_copy(update={"parallel": job.parallel.model_copy(update={"schedule": "auto"})})
    directory = tmp_path / "run"
    checkpoint = step_directory(directory / "checkpoints", 2)
    commit(checkpoint, 2, [write_shard(checkpoint, "rank-00000", {"param/a": torch.ones(1)})], {})
    (directory / RECORD).write_text(json.dumps(searched.model_dump(mode="json")))
    make_plan(searched).save(directory / "plan.json")
    calls.clear()
    go(searched, directory, resume=True)
    assert calls == ONCE


@pytest.mark.slow
def test_a_model_of_arrays(job: JobSpec, calls: Counter[str], tmp_path: Path) -> None:
    """The fields that the data declare are those that are prepared, so the model serves for both."""
    rows = np.random.default_rng(0).integers(0, 50, (40, 12))
    np.savez(tmp_path / "rows.npz", input_ids=rows, labels=rows)
    config = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 12, "vocab_size": 50}
    arrays = job_from({
        **job.model_dump(), "model": {"hf": "gpt2", "config": config},
        "data": {"type": "arrays", "path": str(tmp_path / "rows.npz")},
    })  # fmt: skip
    go(arrays, tmp_path / "run")
    assert calls == ONCE
