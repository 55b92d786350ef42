"""When validation no longer improves. That follows from the run's log alone, so a restart finds it again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from raypipe.job.train_spec import EarlyStopSpec
from raypipe.observe.run_log import METRICS, read_rows


@dataclass(slots=True)
class Patience:
    """How long validation has not improved.

    An improvement is a loss more than ``min_delta`` below that of the last improvement: many small steps down add up.
    A loss that is no number is none.
    """

    spec: EarlyStopSpec
    loss: float = math.inf
    """Of the last improvement."""
    step: int = 0
    """Steps done by then."""
    waited: int = 0
    """Validations since."""

    def saw(self, step: int, loss: float) -> None:
        """Another validation."""
        if loss < self.loss - self.spec.min_delta:
            self.loss, self.step, self.waited = loss, step, 0
        else:
            self.waited += 1

    @property
    def exhausted(self) -> bool:
        """Time to stop."""
        return self.waited >= self.spec.patience

    def __str__(self) -> str:
        least = f" by more than {self.spec.min_delta:g}" if self.spec.min_delta else ""
        since = f"since step {self.step}, when it was {self.loss:.4f}" if self.step else "from the start"
        plural = "s" * (self.waited > 1)
        return f"validation has not improved{least} in {self.waited} validation{plural} {since}"


def patience_of(directory: Path, spec: EarlyStopSpec, done: int) -> Patience:
    """As it was after ``done`` steps of the run in ``directory``."""
    patience = Patience(spec)
    for row in read_rows(directory / METRICS):
        if "val_loss" in row and row["step"] <= done:
            patience.saw(row["step"], row["val_loss"])
    return patience
