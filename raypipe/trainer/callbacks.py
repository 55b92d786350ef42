"""Tell of a run as the Hugging Face Trainer does: result, log (``state.log_history``) and callbacks.

Its callbacks, ``transformers.TrainerCallback``, are told of a run in other processes. They get the arguments, a
``TrainerState`` and a ``TrainerControl`` as there, and of ``model``, ``processing_class``, ``optimizer`` and so on what
this process has: the model that was given, with the weights that it was given, and the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.train import Result

from raypipe.checkpoint import best
from raypipe.errors import SpecError
from raypipe.launch.followers import Callback
from raypipe.observe.run_dir import EVALUATE, RECORD, SAVE, ask
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.train import saved_job

if TYPE_CHECKING:
    from raypipe.job import JobSpec


# The log of a run, from the rows of metrics.jsonl.


NAMES = {"grad_norm": "grad_norm", "lr": "learning_rate"}
"""The Trainer's names of a step's figures."""


@dataclass(slots=True)
class History:
    """Takes in a run's rows in their order."""

    every: int
    """Steps between two entries of the training loss, which is the mean since the one before; 0 for none."""
    per_epoch: float
    """Steps of an epoch."""
    first: bool = False
    """Whether the first step has an entry of its own."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)

    def epoch(self, step: int) -> float:
        """Return the passes over the training data after ``step`` steps."""
        return step / self.per_epoch

    def take(self, row: Mapping[str, Any], now: bool = False) -> dict[str, Any] | None:
        """Take in a row; return its entry, if it has one, or is to have one ``now``."""
        step = int(row["step"])
        if "val_loss" in row:
            entry = evaluation(row)
        else:
            self._losses.append(row["loss"])
            if not (now or (self.every and step % self.every == 0) or (self.first and step == 1)):
                return None
            entry = {"loss": math.fsum(self._losses) / len(self._losses)}
            entry |= {NAMES[name]: row[name] for name in NAMES if row.get(name) is not None}
            self._losses.clear()
        self.entries.append({**entry, "epoch": self.epoch(step), "step": step})
        return {**entry, "epoch": self.epoch(step)}


class PrintedLog(Callback):
    """Prints the log while a run goes on, a line an entry, as the Trainer does."""

    def __init__(self, history: History) -> None:
        self._history = history

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """See Callback."""
        entry = self._history.take(metrics)
        if entry is not None:
            print({name: f"{value:.4g}" for name, value in entry.items()}, flush=True)

    on_evaluate = on_step_end


def evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a validation by the Trainer's names, such as ``eval_loss``."""
    return {f"eval_{name.removeprefix('val_')}": value for name, value in row.items() if name != "step"}


def steps_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that are of steps."""
    return [row for row in read_rows(directory / METRICS) if "val_loss" not in row]


def state_of(directory: Path, history: History) -> Any:
    """Return ``transformers.TrainerState`` of the run in ``directory``; ``history`` takes in its log."""
    from transformers import TrainerState

    rows = read_rows(directory / METRICS)
    for row in rows:
        history.take(row)
    steps = steps_of(directory)
    state = TrainerState(
        epoch=history.epoch(len(steps)),
        global_step=len(steps),
        log_history=history.entries,
        max_steps=saved_job(directory).train.steps if (directory / RECORD).exists() else 0,
    )
    kept = best(directory / "checkpoints")
    if kept is not None:
        metric = saved_job(directory).train.best_metric
        state.best_model_checkpoint, state.best_global_step = str(kept.path), kept.step
        state.best_metric = next(
            (row.get(f"val_{metric}") for row in rows if row["step"] == kept.step and "val_loss" in row), None
        )
    return state


class Figures:
    """Prints and writes figures."""

    directory: Path
    state: Any

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        """Print metrics as the Trainer's scripts do."""
        from transformers.trainer_pt_utils import log_metrics

        log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write metrics to ``SPLIT_results.json`` in ``output_dir``, and with ``combined`` to ``all_results.json``."""
        from transformers.trainer_pt_utils import save_metrics

        save_metrics(_Saves(self), split, metrics, combined)

    def save_state(self) -> None:
        """Write ``state`` to ``trainer_state.json`` in ``output_dir``."""
        self.state.save_to_json(str(self.directory / "trainer_state.json"))

    def is_world_process_zero(self) -> bool:
        """Return True: the process that calls ``train`` is the only one that runs the script."""
        return True

    is_local_process_zero = is_world_process_zero


class _Saves:
    """The part of a Trainer that ``transformers.trainer_pt_utils`` needs to write its files."""

    def __init__(self, trainer: Figures) -> None:
        self.args = SimpleNamespace(output_dir=str(trainer.directory))
        self.is_world_process_zero = trainer.is_world_process_zero


# The result: Ray Train's, with what ``transformers.TrainOutput`` has as well.


@dataclass
class TrainResult(Result):  # type: ignore[misc]
    """Ray Train's result (metrics, newest checkpoint, path, error)."""

    global_step: int = 0
    """Steps done."""
    training_loss: float = math.nan
    """Mean loss of the steps of this call."""


def result_of(
    result: Result, rows: Sequence[Mapping[str, Any]], job: JobSpec, seconds: float, epochs: float
) -> TrainResult:
    """Return Ray Train's result with the metrics that the Trainer's scripts print.

    Args:
        result: Ray Train's.
        rows: the steps that this call has made, from metrics.jsonl.
        job: the job.
        seconds: how long ``train`` took, planning and start-up included.
        epochs: passes over the training data so far.
    """
    steps = len(rows)
    loss = math.fsum(row["loss"] for row in rows) / steps if steps else math.nan
    own = {field.name: getattr(result, field.name) for field in fields(Result)}
    metrics = {
        **(result.metrics or {}),
        "train_runtime": seconds,
        "train_samples_per_second": steps * job.train.batch / seconds,
        "train_steps_per_second": steps / seconds,
        "train_loss": loss,
        "epoch": epochs,
    }
    done = int(metrics.get("step", rows[-1]["step"] if rows else 0))
    return TrainResult(**{**own, "metrics": metrics}, global_step=done, training_loss=loss)


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
