"""The flags that a callback of the Trainer sets: what is heard while a run goes on, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.trainer.history import History
from raypipe.trainer.trainer_callbacks import TrainerCallbacks

transformers = pytest.importorskip("transformers")


def followed(flag: str, step: int, directory: Path) -> list[dict[str, Any]]:
    """Tell of six steps of a log every four; a callback sets the flag after one of them."""

    class Sets(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                setattr(control, flag, True)

    history = History(4, 10.0)
    told = TrainerCallbacks([Sets()], None, transformers.TrainerState(), history, directory, {})
    told.begin(0)
    for number in range(1, 7):
        told.on_step_end(number, {"step": number, "loss": float(number)})
    return history.entries


def test_a_log_that_is_asked_for_has_the_losses_since_the_one_before(tmp_path: Path) -> None:
    entries = followed("should_log", 2, tmp_path)
    assert [(entry["step"], entry["loss"]) for entry in entries] == [(2, 1.5), (4, 3.5)]


@pytest.mark.parametrize("flag", ["should_evaluate", "should_epoch_stop"])
def test_what_is_not_heard_is_said_once(flag: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"control.{flag}, which has no effect") as said:
        entries = followed(flag, 3, tmp_path)
    assert len(said) == 1
    assert [entry["step"] for entry in entries] == [4]
