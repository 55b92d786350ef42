"""Handle steps whose loss, gradients or norm are not finite (``train.on_nonfinite``), in the driver.

``skip`` is done by the devices, which all see the same global norm (``update.updates``); the driver counts. ``rewind``
goes back to the last checkpoint and on with the data after the bad mini-batch, so that all mini-batches since the
checkpoint are left out: a run whose state has drifted to where it diverges takes another way from there (Chowdhery et
al. 2022, PaLM, arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raypipe.checkpoint import Checkpoint, latest, open_checkpoint
from raypipe.errors import CheckpointError

SKIPS_IN_A_ROW = 20
"""Steps that may be skipped one after another; more, and it is not their data."""
REWINDS_IN_A_ROW = 3
"""Rewinds to the same checkpoint."""
LEFT_OUT = "left_out"
"""Key of a manifest's ``meta``: the mini-batches that were left out before it, beside those that steps were made of."""


class NonFiniteError(Exception):
    """A number of a step is infinite or not a number; ``step`` counts from 1."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step, self.what = step, what


def left_out_before(checkpoint: Path | None) -> int:
    """Return the number of mini-batches that the run had left out when it wrote a checkpoint.

    Raises:
        CheckpointError: the manifest says something else.
    """
    return 0 if checkpoint is None else left_out_of(open_checkpoint(checkpoint, verify=False))


def left_out_of(checkpoint: Checkpoint) -> int:
    """As ``left_out_before``, of an open checkpoint."""
    result = checkpoint.meta.get(LEFT_OUT, 0)
    if type(result) is not int or result < 0:
        why = f"{LEFT_OUT} is no number of mini-batches"
        raise CheckpointError(str(checkpoint.path), why, "use an earlier checkpoint")
    return result


@dataclass(frozen=True, slots=True)
class Rewind:
    """Where a run goes on."""

    done: int
    """Number of steps done."""
    checkpoint: Path | None
    """None for the start."""
    left_out: int
    """Mini-batches left out from there on, in all."""
    notices: tuple[str, ...]


class NonFinitePolicy:
    """Counts what was skipped and rewound."""

    def __init__(self, kind: Literal["stop", "skip", "rewind"]) -> None:
        self._kind = kind
        self._skipped: tuple[int, int] = (0, 0)
        """The newest skipped step, and how many were in a row with it."""
        self._rewound: tuple[int, int] = (-1, 0)
        """The step after which the newest rewind went on, and how many did so in a row."""

    def skip(self, step: int, what: str) -> None:
        """Note that no device has made the update of a step.

        Raises:
            NonFiniteError: that is not so, or there were too many in a row.
        """
        if self._kind != "skip":
            raise NonFiniteError(step, what)
        last, count = self._skipped
        self._skipped = (step, count + 1 if last == step - 1 else 1)
        if self._skipped[1] > SKIPS_IN_A_ROW:
            raise NonFiniteError(step, f"{what}, after {SKIPS_IN_A_ROW} steps in a row that were skipped for the like")

    def rewind(self, error: NonFiniteError, newest: tuple[int, Path | None], root: Path, left_out: int) -> Rewind:
        """Decide where to go on.

        Args:
            error: what was found.
            newest: the newest complete checkpoint, with its number of steps; None for the start.
            root: the folder of the run's checkpoints.
            left_out: the mini-batches that have been left out so far.

        Raises:
            NonFiniteError: the run is to stop.
        """
        if self._kind != "rewind":
            raise error
        done, checkpoint = newest
        notices: list[str] = []
        try:
            if checkpoint is not None:
                open_checkpoint(checkpoint)
        except CheckpointError:
            checkpoint, notices = latest(root)
            done = 0 if checkpoint is None else open_checkpoint(checkpoint, verify=False).step
        last, count = self._rewound
        self._rewound = (done, count + 1 if last == done else 1)
        if self._rewound[1] > REWINDS_IN_A_ROW:
            what = f"{error.what}, after {REWINDS_IN_A_ROW} rewinds in a row to step {done}"
            raise NonFiniteError(error.step, what)
        return Rewind(done, checkpoint, left_out + error.step - done, tuple(notices))
