"""Callbacks hear what a run logs, may end it, and an error of theirs ends it in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import RunError
from raypipe.launch.followers import Callback, Callbacks
from raypipe.observe.run_dir import STOP, Stop, ask, asked_to_stop
from raypipe.observe.run_log import EVENTS, RunLog, read_rows


class Told(Callback):
    def __init__(self) -> None:
        self.heard: list[tuple[str, int, Any]] = []

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.heard.append(("step", step, metrics["loss"]))

    def on_evaluate(self, step: int, metrics: dict[str, Any]) -> None:
        self.heard.append(("eval", step, metrics["val_loss"]))

    def on_save(self, step: int, path: Path) -> None:
        self.heard.append(("save", step, path))


def test_they_hear_each_row_once(tmp_path: Path) -> None:
    told, log = Told(), RunLog(tmp_path)
    callbacks = Callbacks([told], tmp_path)
    callbacks.update()
    log.metric({"step": 1, "loss": 2.0})
    log.metric({"step": 1, "val_loss": 3.0})
    log.event("checkpoint", step=1, path="somewhere", best=False)
    callbacks.update()
    log.metric({"step": 2, "loss": 1.0})
    callbacks.update()
    expected = [("step", 1, 2.0), ("eval", 1, 3.0), ("save", 1, Path("somewhere")), ("step", 2, 1.0)]
    assert told.heard == expected
    assert asked_to_stop(tmp_path) is None
    callbacks.raise_error()


def test_the_first_error_asks_the_run_to_end_and_names_its_callback(tmp_path: Path) -> None:
    class Broken(Told):
        def on_evaluate(self, step: int, metrics: dict[str, Any]) -> None:
            raise KeyError("bleu")

    broken, after, log = Broken(), Told(), RunLog(tmp_path)
    callbacks = Callbacks([broken, after], tmp_path)
    log.metric({"step": 1, "loss": 2.0})
    log.metric({"step": 1, "val_loss": 3.0})
    log.metric({"step": 2, "loss": 1.0})
    callbacks.update()
    assert asked_to_stop(tmp_path) == Stop("Broken.on_evaluate failed", pauses=False)
    assert broken.heard == after.heard == [("step", 1, 2.0)]
    with pytest.raises(RunError, match=r"callbacks: Broken\.on_evaluate: raised KeyError: 'bleu'"):
        callbacks.raise_error()


@pytest.mark.runs
def test_a_run_that_is_asked_to_end_does_so_with_a_checkpoint(stage_pool, text_folder: Path, tmp_path: Path) -> None:
    from tests.runtime.runs.small_runs import drive, small_job

    parallel = {"schedule": "1f1b", "stages": 2}
    # On a busy machine a checkpoint may be written only some steps after its own.
    whole = drive(small_job(text_folder, parallel, steps=60), stage_pool, tmp_path / "whole")

    def saved(_workers: object, step: int) -> None:
        ask(tmp_path / "ended", STOP, f"enough after {step}")

    job = small_job(text_folder, parallel, steps=60, checkpoint_every=3)
    ended = drive(job, stage_pool, tmp_path / "ended", saved=saved)
    done = len(ended.losses)
    assert 3 < done < 60
    assert ended.losses == whole.losses[:done]
    assert sorted(ended.checkpoints)[-1] == done
    assert len(ended.val_losses) == 1
    events = [e for e in read_rows(tmp_path / "ended" / EVENTS) if e["event"] == "early_stop"]
    assert [(e["step"], e["message"]) for e in events] == [(done, "enough after 3")]
