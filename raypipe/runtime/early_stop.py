"""Early stopping: decide when validation no longer improves.

The state follows from the run's log alone, so a restart recovers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from raypipe.job.train_spec import EarlyStopSpec
from raypipe.observe.run_log import METRICS, read_rows


@dataclass(slots=True)
class Patience:
    """Counts the validations since the last improvement.

    A loss is an improvement if it is more than ``min_delta`` below the loss of the last improvement, so several small
    decreases add up to one. NaN is never an improvement.
    """

    spec: EarlyStopSpec
    loss: float = math.inf
    """Validation loss at the last improvement."""
    step: int = 0
    """Number of steps done at the last improvement."""
    waited: int = 0
    """Number of validations since the last improvement."""

    def saw(self, step: int, loss: float) -> None:
        """Record the loss of a validation after ``step`` steps."""
        if loss < self.loss - self.spec.min_delta:
            self.loss, self.step, self.waited = loss, step, 0
        else:
            self.waited += 1

    @property
    def exhausted(self) -> bool:
        """Whether training should stop."""
        return self.waited >= self.spec.patience

    def __str__(self) -> str:
        least = f" by more than {self.spec.min_delta:g}" if self.spec.min_delta else ""
        since = f"since step {self.step}, when it was {self.loss:.4f}" if self.step else "from the start"
        plural = "s" * (self.waited > 1)
        return f"validation has not improved{least} in {self.waited} validation{plural} {since}"


def patience_of(directory: Path, spec: EarlyStopSpec, done: int) -> Patience:
    """Recover the state after ``done`` steps from the log of the run in ``directory``."""
    patience = Patience(spec)
    for row in read_rows(directory / METRICS):
        if "val_loss" in row and row["step"] <= done:
            patience.saw(row["step"], row["val_loss"])
    return patience
