"""Callbacks of the Hugging Face Trainer, ``transformers.TrainerCallback``, told of a run in other processes.

They get the arguments, a ``TrainerState`` and a ``TrainerControl`` as there, and of ``model``, ``processing_class``,
``optimizer`` and so on what this process has: the model that was given, with the weights that it was given, and the
tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.launch.followers import Callback
from raypipe.observe.run_dir import EVALUATE, SAVE, ask
from raypipe.trainer.history import History, evaluation


class TrainerCallbacks(Callback):
    """Passes on what ``raypipe.Callback`` hears.

    Args:
        callbacks: those of a trainer; of transformers' among them each event is told.
        args: ``transformers.TrainingArguments``.
        state: ``transformers.TrainerState``, kept up to date.
        history: takes in the run's rows.
        directory: the run directory.
        given: ``model`` and ``processing_class``.
    """

    def __init__(
        self, callbacks: GivenCallbacks, args: Any, state: Any, history: History, directory: Path, given: dict[str, Any]
    ) -> None:
        from transformers import TrainerControl

        self._callbacks, self._args, self._state = callbacks, args, state
        self._history, self._directory = history, directory
        self._control = TrainerControl()
        self._given = dict.fromkeys(("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")) | given
        self._epoch = -1
        self._state.log_history = history.entries

    def made(self) -> None:
        """The trainer is made."""
        self._tell("on_init_end")

    def begin(self, step: int) -> None:
        """The run begins after ``step`` steps."""
        self._state.global_step, self._state.epoch = step, self._history.epoch(step)
        self._control.should_training_stop = False
        self._tell("on_train_begin")
        self._control.should_save = self._control.should_evaluate = False  # as the Trainer's first step does

    def end(self) -> None:
        """The run has ended."""
        if self._epoch >= 0:
            self._tell("on_epoch_end")
        self._tell("on_train_end")

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """See Callback; an epoch begins with the first step that has a sample of it."""
        epoch = int(self._history.epoch(step - 1))
        if epoch > self._epoch:
            if self._epoch >= 0:
                self._tell("on_epoch_end")
            self._epoch, self._control.should_epoch_stop = epoch, False
            self._tell("on_epoch_begin")
        self._tell("on_step_begin")
        self._state.global_step, self._state.epoch = step, self._history.epoch(step)
        for event in ("on_pre_optimizer_step", "on_optimizer_step", "on_step_end"):
            self._tell(event)
        entry = self._history.take(metrics, self._control.should_log)
        self._control.should_log = False
        if entry is not None:
            self._tell("on_log", logs=entry)
        self._hear()

    def on_evaluate(self, step: int, metrics: dict[str, Any]) -> None:
        """See Callback."""
        entry = self._history.take(metrics)
        self._tell("on_log", logs=entry)
        self.evaluated(evaluation(metrics))
        self._control.should_evaluate = False
        self._hear()

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """``evaluate`` was called, or the run has validated."""
        self._tell("on_evaluate", metrics=metrics)

    def predicted(self, metrics: dict[str, Any]) -> None:
        """``predict`` was called."""
        self._tell("on_predict", metrics=metrics)

    def on_save(self, step: int, path: Path) -> None:
        """See Callback."""
        self._tell("on_save")

    def should_stop(self) -> bool:
        """Return whether a callback has set ``control.should_training_stop``."""
        return bool(self._control.should_training_stop)

    def _tell(self, event: str, **more: Any) -> None:
        for callback in self._callbacks.theirs:
            answer = getattr(callback, event)(self._args, self._state, self._control, **self._given, **more)
            self._control = self._control if answer is None else answer

    def _hear(self) -> None:
        """Carry out what callbacks ask for.

        Raises:
            SpecError: one ends the epoch, which is not over; at its end the flag has no effect, as in the Trainer.
        """
        if self._control.should_save:
            ask(self._directory, SAVE)
        if self._control.should_evaluate:
            ask(self._directory, EVALUATE)
        self._control.should_save = self._control.should_evaluate = False
        if self._control.should_epoch_stop and self._state.epoch % 1:
            why = "is set by a callback, and the rows of all epochs are chosen before the run"
            raise SpecError("control.should_epoch_stop", why, "set should_training_stop, which ends the run")


class GivenCallbacks:
    """The callbacks of a trainer, in their order.

    Args:
        callbacks: instances or classes.

    Raises:
        SpecError: one is of no kind.
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._all: list[Any] = []
        for one in callbacks:
            self.add(one)

    def add(self, callback: Any) -> None:
        """Add an instance, or one of a class.

        Raises:
            SpecError: it is of no kind.
        """
        from ray.train import UserCallback

        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, (Callback, UserCallback)) and not _is_theirs(made):
            raise SpecError(
                "callbacks",
                f"a {type(made).__name__} is no callback",
                "derive it from raypipe.Callback, transformers.TrainerCallback or ray.train.UserCallback",
            )
        self._all.append(made)

    def pop(self, callback: Any) -> Any:
        """Remove an instance, or the first one of a class, and return it; None if there is none."""
        for number, one in enumerate(self._all):
            if isinstance(one, callback) if isinstance(callback, type) else one == callback:
                return self._all.pop(number)
        return None

    @property
    def own(self) -> list[Callback]:
        """raypipe's."""
        return [one for one in self._all if isinstance(one, Callback)]

    @property
    def rays(self) -> list[Any]:
        """Ray Train's."""
        return [one for one in self._all if not isinstance(one, Callback) and not _is_theirs(one)]

    @property
    def theirs(self) -> list[Any]:
        """Those of transformers, but for its EarlyStoppingCallback."""
        return [one for one in self._all if _is_theirs(one) and not _stops_early(one)]

    @property
    def early_stop(self) -> dict[str, Any] | None:
        """``train.early_stop`` for the last EarlyStoppingCallback of transformers; None without one."""
        found: dict[str, Any] | None = None
        for one in filter(_stops_early, self._all):
            found = {
                "patience": int(one.early_stopping_patience),
                "min_delta": float(one.early_stopping_threshold or 0.0),
            }
        return found


def _is_theirs(callback: Any) -> bool:
    named = hasattr(callback, "on_train_begin") and hasattr(callback, "on_step_end")
    return named and not isinstance(callback, Callback)


def _stops_early(callback: Any) -> bool:
    return hasattr(callback, "early_stopping_patience")
