"""The checkpoints of one attempt at a run: each is committed whole or not at all, and the best one is kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from raypipe.checkpoint import LOSS, ShardInfo, best, commit, forget_best, keep_best, step_directory
from raypipe.checkpoint.write import NAME
from raypipe.errors import DivergenceError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.runtime.recovery.nonfinite import LEFT_OUT

SCORE = "score"
"""Key of a manifest's ``meta`` where ``train.best_metric`` is not the loss: its name, and its value as a score."""
Saved = Callable[[int, Path, dict[str, Any]], None]
"""Called for every complete checkpoint with its step, directory and metrics."""


class RunCheckpoints:
    """Chooses where workers write their shards, and commits a checkpoint when all have been written."""

    def __init__(self, job: JobSpec, directory: Path, log: RunLog, saved: Saved) -> None:
        self._job, self.root, self._log, self._saved = job, directory / "checkpoints", log, saved
        self._best_score = math.inf
        """Score of the best checkpoint (``early_stop.score``)."""
        self._committed: tuple[int, Path] | None = None
        """The newest complete checkpoint, which a resume would continue from: steps done, and its directory."""
        self.left_out = 0
        """Mini-batches of training data that were left out so far."""

    def resume(self, checkpoint: Path | None, done: int) -> None:
        """Start from ``checkpoint``, written after ``done`` steps; from no checkpoint if None."""
        self._committed = (done, checkpoint) if checkpoint is not None else None
        self._best_score = math.inf
        if self._job.train.keeps_best:
            kept = best(self.root)
            if kept is not None and kept.step > done:  # its steps will be run again, perhaps by another job
                forget_best(self.root)
            elif kept is not None:
                metric, kept_score = kept.meta.get(SCORE, ("loss", kept.meta[LOSS]))
                if metric == self._job.train.best_metric:
                    self._best_score = kept_score

    @property
    def newest(self) -> tuple[int, Path | None]:
        """The newest complete checkpoint: steps done, and its directory; None for the start."""
        return (0, None) if self._committed is None else self._committed

    def improves(self, score: float) -> bool:
        """Record a validation's score; return whether it is the best so far, so that its parameters must be saved."""
        better = score < self._best_score
        self._best_score = min(score, self._best_score)
        return better

    def folder(self, step: int, begun: Collection[Path] = ()) -> Path:
        """Create the directory for the save after ``step`` steps, removing an incomplete save of an earlier attempt.

        What is in those that this attempt has ``begun`` stays: a worker may still be writing there.
        """
        path = step_directory(self.root, step)
        if path not in begun and path.exists() and not (path / NAME).exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(
        self, step: int, shards: Sequence[ShardInfo], val_loss: float | None, is_best: bool, score: float | None = None
    ) -> None:
        """Make the shards that workers have written one checkpoint. A thread may do so, then call ``committed``.

        Args:
            step: number of steps done.
            shards: all of them.
            val_loss: validation loss of these parameters, if known.
            is_best: whether this checkpoint is the best so far.
            score: score of that validation, if known.

        Raises:
            CheckpointError: it cannot be written to disk.
        """
        path = step_directory(self.root, step)
        listed = {shard.file for shard in shards} | {NAME}
        for file in path.iterdir():  # what a worker left that died while it wrote
            if file.name not in listed:
                file.unlink()
        meta: dict[str, Any] = {"job": self._job.name}
        if val_loss is not None:
            meta[LOSS] = val_loss
        if score is not None and (metric := self._job.train.best_metric) != "loss":
            meta[SCORE] = (metric, score)
        if self.left_out:
            meta[LEFT_OUT] = self.left_out
        commit(path, step, shards, meta)
        if is_best:
            keep_best(self.root, path)

    def committed(self, step: int, metrics: dict[str, Any], is_best: bool, stall_s: float, write_s: float) -> None:
        """Tell the log and the caller of a checkpoint that is complete.

        Args:
            step: number of steps done.
            metrics: passed on to ``Saved``.
            is_best: whether it is the best so far.
            stall_s: seconds in which training waited for it.
            write_s: seconds in which the slowest worker wrote.
        """
        path = step_directory(self.root, step)
        self._committed = (step, path)
        self._log.event("checkpoint", step=step, path=str(path), best=is_best, stall_s=stall_s, write_s=write_s)
        self._saved(step, path, {"step": step, **metrics})

    def delete(self, path: Path) -> None:
        """Delete what was written for a save that will not be committed."""
        if not (path / NAME).exists():
            shutil.rmtree(path, ignore_errors=True)

    def diverged(self, step: int, what: str) -> DivergenceError:
        """Make the error for a step whose numbers are not finite; it names the checkpoint that a resume begins with."""
        fix = "lower train.lr, or set a longer warm-up" + (" or train.clip" if self._job.train.clip is None else "")
        if self._committed is None:
            return DivergenceError(f"step {step}", what, f"{fix}; there is no earlier checkpoint, so train anew")
        done, path = self._committed
        return DivergenceError(f"step {step}", what, f"{fix}; --resume then continues from step {done} ({path})")
