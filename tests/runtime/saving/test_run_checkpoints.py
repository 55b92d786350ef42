"""What becomes of the folders that workers save in, and of what a diverging run is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raypipe.checkpoint import LOSS, open_checkpoint, step_directory, write_shard
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.saving.saves import RunCheckpoints
from tests.runtime.runs.small_runs import small_job


def checkpoints(text_folder: Path, tmp_path: Path, log: RunLog, saved: list[Any]) -> RunCheckpoints:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2})
    return RunCheckpoints(job, tmp_path, log, lambda *told: saved.append(told))


def test_what_a_dead_attempt_left_is_cleared_and_what_is_whole_is_kept(text_folder: Path, tmp_path: Path) -> None:
    log, saved = RunLog(tmp_path), []
    mine = checkpoints(text_folder, tmp_path, log, saved)
    folder = mine.folder(4)
    (folder / "torn").write_text("half a shard")
    assert mine.folder(4) == folder
    assert not list(folder.iterdir())
    shard = write_shard(folder, "rank-00000", {"param/0.weight": torch.ones(2)})
    (folder / "rank-00001.safetensors.partial-12ab").write_text("of a worker that died")
    mine.commit(4, [shard], 2.5, is_best=False)
    mine.committed(4, {"loss": 1.5}, False, 0.5, 2.0)
    before = sorted(folder.iterdir())
    assert sorted(mine.folder(4).iterdir()) == before
    assert open_checkpoint(folder).meta[LOSS] == 2.5
    assert saved == [(4, folder, {"step": 4, "loss": 1.5})]
    (event,) = read_rows(tmp_path / EVENTS)
    assert (event["event"], event["step"], event["best"]) == ("checkpoint", 4, False)
    assert (event["stall_s"], event["write_s"]) == (0.5, 2.0)


def test_what_this_attempt_is_writing_stays_and_what_it_gives_up_goes(text_folder: Path, tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    mine = checkpoints(text_folder, tmp_path, log, [])
    folder = mine.folder(4)
    (folder / "under-way").write_text("half a shard")
    assert list(mine.folder(4, {folder}).iterdir()) == [folder / "under-way"]
    mine.delete(folder)
    assert not folder.exists()
    shard = write_shard(mine.folder(4), "rank-00000", {"param/0.weight": torch.ones(2)})
    mine.commit(4, [shard], None, is_best=False)
    mine.delete(folder)  # it is complete
    assert open_checkpoint(folder).step == 4


def test_a_run_that_diverges_is_told_what_a_resume_goes_on_from(text_folder: Path, tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    mine = checkpoints(text_folder, tmp_path, log, [])
    mine.resume(step_directory(tmp_path / "checkpoints", 2), 2)
    assert "continues from step 2" in mine.diverged(4, "param/0.weight is not finite").fix
    mine.committed(3, {}, False, 0.0, 0.0)
    assert "continues from step 3" in mine.diverged(4, "param/0.weight is not finite").fix


def test_only_a_lower_loss_is_better(text_folder: Path, tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    mine = checkpoints(text_folder, tmp_path, log, [])
    assert [mine.improves(loss) for loss in (3.0, 3.0, 2.0, 2.5, 1.0)] == [True, False, True, False, True]
