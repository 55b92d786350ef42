"""Runs whose stages Inductor has compiled give the loss curves of plain PyTorch."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.observe.run_dir import STOP, ask
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.compiled.toolchain import missing_toolchain
from raypipe.train import prepare_run
from tests.exhaustive import exhaustive
from tests.runtime.runs.plain_training import plain_losses, plain_val_loss
from tests.runtime.runs.small_runs import drive, small_job

compiles = pytest.mark.skipif(missing_toolchain() is not None, reason=str(missing_toolchain()))


def compiled_rows(directory: Path) -> list[dict]:
    return [row for row in read_rows(directory / EVENTS) if row["event"] == "compiled"]


@pytest.mark.slow
@pytest.mark.runs
@compiles
def test_split_backward_with_dropout_and_tied_embeddings(stage_pool, text_folder, tmp_path) -> None:
    job = small_job(text_folder, {"schedule": "zb-h1", "stages": 2}, {"layers": 2}, lr=0.001, clip=0.5,
                    compile="inductor", compile_first=True, eval_every=2)  # fmt: skip
    done = drive(job, stage_pool, tmp_path)
    rows = compiled_rows(tmp_path)
    assert [(row["reason"], row["validation_lengths"]) for row in rows] == [(None, 1)] * 2
    data = tmp_path / "data"
    assert done.losses == pytest.approx(plain_losses(job, data, 4), abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx([plain_val_loss(job, data, steps) for steps in (2, 4)], abs=1e-9, rel=0)


@pytest.mark.slow
@pytest.mark.runs
@compiles
@pytest.mark.parametrize("given", [True, *exhaustive(False)], ids=["inductor", "auto"])
def test_tensor_ranks_run_one_program(given: bool, stage_pool, text_folder, tmp_path) -> None:
    """With dropout, tied and divided embeddings, a divided loss and validations; ``auto`` decides for both ranks."""
    train = {"compile": "inductor", "eval_every": 2} if given else {"compile": "auto", "steps": 16}
    job = small_job(text_folder, {"schedule": "zb-h1", "stages": 2, "tensor": 2}, {"layers": 2}, lr=0.001, clip=0.5,
                    compile_first=True, **train)  # fmt: skip
    done = drive(job, stage_pool, tmp_path)
    rows = compiled_rows(tmp_path)
    assert [(row["reason"], row["validation_lengths"]) for row in rows[:4]] == [(None, int(given))] * 4
    slower = [row["reason"] for row in rows[4:]]
    assert len(slower) in (0, 2, 4)
    assert all("s a step" in reason for reason in slower)
    data = tmp_path / "data"
    assert done.losses == pytest.approx(plain_losses(job, data, job.train.steps), abs=1e-9, rel=0)
    if given:
        assert done.val_losses == pytest.approx([plain_val_loss(job, data, n) for n in (2, 4)], abs=1e-9, rel=0)


@pytest.mark.slow
@pytest.mark.runs
@compiles
def test_stages_are_swapped_in_beside_training(stage_pool, text_folder, tmp_path) -> None:
    """A run starts eagerly; its losses are those of plain PyTorch before the swap and after it.

    The stages are those of the run above, so that they are found compiled where both tests run.
    """
    job = small_job(text_folder, {"schedule": "zb-h1", "stages": 2}, {"layers": 2}, lr=0.0001, steps=100_000,
                    compile="inductor", eval_every=1000)  # fmt: skip
    log = tmp_path / EVENTS

    def stop_after_swap() -> None:
        while not ended.wait(0.1):
            if log.exists() and any(row["event"] == "swapped" for row in read_rows(log)):
                ended.wait(0.5)
                ask(tmp_path, STOP, "it has seen enough")
                return

    ended = threading.Event()
    watcher = threading.Thread(target=stop_after_swap)
    watcher.start()
    try:
        done = drive(job, stage_pool, tmp_path)
    finally:
        ended.set()
        watcher.join()
    rows = read_rows(log)
    assert [row["reason"] for row in rows if row["event"] == "compiled"] == [None, None]
    (swapped,) = [row["step"] for row in rows if row["event"] == "swapped"]
    assert 1 < swapped < len(done.losses)
    few = done.losses[: swapped + 5]
    plain = plain_losses(job.model_copy(update={"train": job.train.model_copy(update={"steps": len(few)})}),
                         tmp_path / "data", len(few))  # fmt: skip
    assert few == pytest.approx(plain, abs=1e-9, rel=0)


@pytest.mark.runs
def test_what_cannot_be_compiled_runs_eagerly_and_is_said(stage_pool, text_folder, tmp_path) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 1, "replicas": 2, "sync": "prioritised"},
                    lr=0.001, compile="auto")  # fmt: skip
    done = drive(job, stage_pool, tmp_path)
    reasons = {row["reason"] for row in compiled_rows(tmp_path)}
    assert len(reasons) == 1
    assert "layer by layer" in reasons.pop()
    assert done.losses == pytest.approx(plain_losses(job, tmp_path / "data", 4), abs=1e-9, rel=0)


def test_without_a_compiler_it_is_refused_before_anything_starts(text_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, compile="inductor")
    with pytest.raises(SpecError, match=r"train\.compile: there is no C\+\+ compiler"):
        prepare_run(job, tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()
