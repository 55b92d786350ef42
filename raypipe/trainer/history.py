"""The log of a run as the Hugging Face Trainer keeps it (``state.log_history``), from the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypipe.launch.callbacks import Callback

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
