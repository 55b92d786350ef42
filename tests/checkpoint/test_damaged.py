"""A damaged newest checkpoint is passed over with a notice; one that is asked for by its step is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raypipe.checkpoint import commit, keep_best, write_shard
from raypipe.cli import run as main
from raypipe.errors import CheckpointError, SpecError
from raypipe.job.spec import load_job
from raypipe.observe.run_dir import RECORD
from raypipe.trained import last_checkpoint
from raypipe.trainer.pipeline_trainer import PipelineTrainer

ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 10 and 20, of two shards each."""
    for step in (10, 20):
        folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        shards = [write_shard(folder, f"rank-{n:05d}", {f"param/{n}.w": torch.full((4,), step)}) for n in range(2)]
        commit(folder, step, shards, {})
    return tmp_path / "run"


def link(folder: Path) -> None:
    shard = next(folder.glob("rank-00001*"))
    shard.rename(folder.parent / "elsewhere")
    shard.symlink_to(folder.parent / "elsewhere")


def linked_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere.json")


def manifest_of_another(folder: Path) -> None:
    shutil.copy(folder.parent / "step-00000010" / "manifest.json", folder)


def manifest_that_points_out(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("rank-00001", "../step-00000010/rank-00001"))


@pytest.mark.parametrize("damage", [link, linked_manifest, manifest_of_another, manifest_that_points_out])
def test_damage(damage: Callable[[Path], None], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = load_job(Path("jobs/quickstart.yaml"), ())
    assert last_checkpoint(run, job).step == 20
    assert capsys.readouterr().err == ""
    damage(run / "checkpoints" / "step-00000020")
    assert last_checkpoint(run, job).step == 10
    said = capsys.readouterr().err
    assert said.startswith("note: skipped checkpoint: ")
    assert "step-00000020" in said
    assert said.endswith("; using step-00000010\n")
    assert last_checkpoint(run, job, 10).step == 10
    with pytest.raises(CheckpointError, match="step-00000020"):
        last_checkpoint(run, job, 20)
    with pytest.raises(SpecError, match=r"no checkpoint of step 17 in .*\n.*nearest is of step 20"):
        last_checkpoint(run, job, 17)


@pytest.mark.parametrize("verb", ["sample", "export", "evaluate", "train"])
def test_a_best_one_that_is_gone_is_not_replaced_by_another(
    verb: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["train.load_best_at_end=true"]
    (run / RECORD).write_text(json.dumps(load_job(Path("jobs/gpt2.yaml"), overrides).model_dump(mode="json")))
    root = run / "checkpoints"
    keep_best(root, root / "step-00000010")
    shutil.rmtree(root / "best-00000010")
    words = {
        "sample": [str(run), "--ids", "1,2"],
        "export": [str(run), "-o", str(tmp_path / "exported")],
        "train": ["jobs/gpt2.yaml", "--set", *overrides, "--run-dir", str(run), "--resume"],
    }
    if verb == "evaluate":
        trainer = PipelineTrainer(model={"hf": "gpt2"}, args={"output_dir": str(run)}, train_dataset=ROWS)
        with pytest.raises(CheckpointError, match="best-00000010, which is gone"):
            trainer.evaluate(ROWS)
        return
    assert main([verb, *words[verb]]) != 0
    said = capsys.readouterr().err
    assert f"{root / 'best'}: leads to best-00000010, which is gone\n  fix: remove {root / 'best'}" in said
