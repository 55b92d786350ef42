"""The flags that a callback of the Trainer sets: what is heard while a run goes on, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raypipe
from raypipe.errors import SpecError
from raypipe.observe.run_dir import EVALUATE, SAVE, asked
from raypipe.trainer.callbacks import GivenCallbacks, History, TrainerCallbacks
from tests.trainer.test_trainer import SMALL, Sums

transformers = pytest.importorskip("transformers")


def followed(flag: str, step: int, directory: Path, per_epoch: float = 10.0) -> list[dict[str, Any]]:
    """Tell of six steps of a log every four; a callback sets the flag after one of them."""

    class Sets(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                setattr(control, flag, True)

    history = History(4, per_epoch)
    told = TrainerCallbacks(GivenCallbacks([Sets]), None, transformers.TrainerState(), history, directory, {})
    told.begin(0)
    for number in range(1, 7):
        told.on_step_end(number, {"step": number, "loss": float(number)})
    return history.entries


def test_a_log_that_is_asked_for_has_the_losses_since_the_one_before(tmp_path: Path) -> None:
    entries = followed("should_log", 2, tmp_path)
    assert [(entry["step"], entry["loss"]) for entry in entries] == [(2, 1.5), (4, 3.5)]


def test_a_validation_and_a_checkpoint_are_asked_for(tmp_path: Path) -> None:
    assert not asked(tmp_path, EVALUATE)
    entries = followed("should_evaluate", 3, tmp_path)
    assert [entry["step"] for entry in entries] == [4]
    assert asked(tmp_path, EVALUATE)
    assert not asked(tmp_path, EVALUATE)
    assert not asked(tmp_path, SAVE)
    followed("should_save", 3, tmp_path)
    assert asked(tmp_path, SAVE)


def test_a_validation_does_not_ask_for_another(tmp_path: Path) -> None:
    """A callback that asks at each log would never end, as a validation is logged."""

    class Asks(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True

    told = TrainerCallbacks(GivenCallbacks([Asks()]), None, transformers.TrainerState(), History(4, 10.0), tmp_path, {})
    told.begin(0)
    told.on_evaluate(1, {"step": 1, "val_loss": 1.0})
    assert not asked(tmp_path, EVALUATE)


def test_an_epoch_does_not_end_early(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"control\.should_epoch_stop: is set by a callback"):
        followed("should_epoch_stop", 3, tmp_path)
    assert [entry["step"] for entry in followed("should_epoch_stop", 3, tmp_path, per_epoch=3.0)] == [4]


def test_callbacks_are_added_and_removed_before_the_run(tmp_path: Path) -> None:
    heard: list[str] = []

    class First(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            heard.append(type(self).__name__)

    class Second(First): ...

    class Own(raypipe.Callback): ...

    made = raypipe.PipelineTrainer(
        {"hf": "gpt2", "config": SMALL}, {"output_dir": str(tmp_path / "run"), "max_steps": 3},
        train_dataset=Sums(20),
    )  # fmt: skip
    made.add_callback(Second())
    made.add_callback(Own)
    made.add_callback(transformers.EarlyStoppingCallback(2))
    assert made._watched is not None
    made._watched.on_step_end(1, {"step": 1, "loss": 1.0})
    assert heard == ["Second"]
    assert isinstance(made.pop_callback(First), Second)
    assert made.pop_callback(First) is None
    made.remove_callback(transformers.PrinterCallback)  # of the Trainer's own; there is none here
    with pytest.raises(ValueError, match="is not among the callbacks"):
        made.remove_callback(First())
    made._watched.on_step_end(2, {"step": 2, "loss": 1.0})
    assert heard == ["Second"]
    own = made._callbacks.own
    assert [type(one) for one in own] == [Own]
    made.remove_callback(own[0])
    assert not made._callbacks.own
    assert made._callbacks.early_stop == {"patience": 2, "min_delta": 0.0}
    with pytest.raises(SpecError, match="a str is no callback"):
        made.add_callback("print")
    with pytest.raises(SpecError, match="push_to_hub: is not available"):
        made.push_to_hub()


def test_only_callbacks_of_the_constructor_hear_that_the_trainer_is_made(tmp_path: Path) -> None:
    """As in the Trainer."""
    heard: list[str] = []

    class Made(transformers.TrainerCallback):
        def on_init_end(self, *_: Any, **__: Any) -> None:
            heard.append("made")

    given = {"model": {"hf": "gpt2", "config": SMALL}, "args": {"output_dir": str(tmp_path / "run")}}
    made = raypipe.PipelineTrainer(train_dataset=Sums(20), callbacks=[Made], **given)
    assert heard == ["made"]
    made.add_callback(Made)
    assert heard == ["made"]
