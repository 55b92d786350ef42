"""How good a validation is, and early stopping: whether validation still improves, or has reached its target.

The state follows from the run's log alone, so a restart recovers it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError, nearest
from raypipe.job.train_spec import EarlyStopSpec, TrainSpec
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.runtime.executor.metrics import PREFIX


def score(train: TrainSpec, row: Mapping[str, Any]) -> float:
    """Return the score of a validation from its row of metrics.jsonl: the lowest is the best (``train.best_is``).

    Raises:
        SpecError: the row has no such figure.
    """
    name = PREFIX + train.best_metric.removeprefix(PREFIX)
    if name not in row:
        figures = [key.removeprefix(PREFIX) for key in row if key.startswith(PREFIX)]
        why = f"{train.best_metric} is not among the figures of a validation, {', '.join(figures)}"
        raise SpecError("train.best_metric", why, nearest(train.best_metric, figures))
    return -float(row[name]) if train.best_is == "highest" else float(row[name])


@dataclass(slots=True)
class Patience:
    """Counts the validations since the last improvement.

    A score is an improvement if it is more than ``min_delta`` below that of the last improvement, so several small
    decreases add up to one. NaN is never an improvement. The score is the validation loss, unless
    ``train.best_metric`` says otherwise (``score``).
    """

    train: TrainSpec
    score: float = math.inf
    """Score at the last improvement."""
    step: int = 0
    """Number of steps done at the last improvement."""
    waited: int = 0
    """Number of validations since the last improvement."""
    reached: tuple[int, float] | None = None
    """Step and score of the first validation that was as good as the target."""

    @property
    def spec(self) -> EarlyStopSpec:
        """Return the job's settings."""
        assert self.train.early_stop is not None
        return self.train.early_stop

    def saw(self, step: int, score: float) -> None:
        """Record the score of a validation after ``step`` steps."""
        if score < self.score - self.spec.min_delta:
            self.score, self.step, self.waited = score, step, 0
        else:
            self.waited += 1
        target = self.spec.target
        if self.reached is None and target is not None and score <= self._as_said(target):
            self.reached = (step, score)

    def _as_said(self, score: float) -> float:
        """Convert between a score and the figure that it stands for."""
        return -score if self.train.best_is == "highest" else score

    @property
    def _figure(self) -> str:
        metric = self.train.best_metric
        return "the validation loss" if metric == "loss" else metric

    @property
    def exhausted(self) -> bool:
        """Return whether training should stop."""
        return self.reached is not None or (self.spec.patience is not None and self.waited >= self.spec.patience)

    def __str__(self) -> str:
        if self.reached is not None:
            value = self._as_said(self.reached[1])
            return f"{self._figure} of {value:.4f} after step {self.reached[0]} has reached its target"
        least = f" by more than {self.spec.min_delta:g}" if self.spec.min_delta else ""
        since = (
            f"since step {self.step}, when it was {self._as_said(self.score):.4f}" if self.step else "from the start"
        )
        plural = "s" * (self.waited > 1)
        what = "validation" if self.train.best_metric == "loss" else self.train.best_metric
        return f"{what} has not improved{least} in {self.waited} validation{plural} {since}"


def patience_of(directory: Path, train: TrainSpec, done: int) -> Patience:
    """Recover the state after ``done`` steps from the log of the run in ``directory``."""
    patience = Patience(train)
    for row in read_rows(directory / METRICS):
        if "val_loss" in row and row["step"] <= done:
            patience.saw(row["step"], score(train, row))
    return patience
