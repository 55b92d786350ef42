"""The result of ``train``, and the log of a run as the Hugging Face Trainer keeps it (``state.log_history``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.train import Result

from raypipe.checkpoint import best
from raypipe.launch.followers import Callback
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.train import saved_job

if TYPE_CHECKING:
    from raypipe.job import JobSpec


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
