"""The checkpoints of one attempt at a run: each is committed whole or not at all, and the best one is kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from raypipe.checkpoint import LOSS, ShardInfo, best, commit, forget_best, keep_best, step_directory
from raypipe.errors import DivergenceError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.runtime.cluster.node_files import SentShard
from raypipe.runtime.cluster.sent_files import received

DISCARD_S = 60.0
"""Longest wait for queued saves that will be discarded; they are queued behind at most two steps."""

Saved = Callable[[int, Path, dict[str, Any]], None]
"""Called for every complete checkpoint with its step, directory and metrics."""


class RunCheckpoints:
    """Chooses where workers write their shards, and commits a checkpoint when all have been written."""

    def __init__(self, job: JobSpec, directory: Path, log: RunLog, saved: Saved) -> None:
        self._job, self._root, self._log, self._saved = job, directory / "checkpoints", log, saved
        self._best_loss = math.inf
        """Validation loss of the best checkpoint."""
        self._committed: tuple[int, Path] | None = None
        """The newest complete checkpoint, which a resume would continue from: steps done, and its directory."""

    def resume(self, checkpoint: Path | None, done: int) -> None:
        """Start from ``checkpoint``, written after ``done`` steps; from no checkpoint if None."""
        self._committed = (done, checkpoint) if checkpoint is not None else None
        if self._job.train.keeps_best:
            kept = best(self._root)
            if kept is not None and kept.step > done:  # its steps will be run again, perhaps by another job
                forget_best(self._root)
            elif kept is not None:
                self._best_loss = kept.meta[LOSS]

    def improves(self, val_loss: float) -> bool:
        """Record a validation loss; return whether it is the best so far, so that its parameters must be saved."""
        better = val_loss < self._best_loss
        self._best_loss = min(val_loss, self._best_loss)
        return better

    def folder(self, step: int) -> Path:
        """Create the directory for the save after ``step`` steps, removing an incomplete save of an earlier attempt."""
        path = step_directory(self._root, step)
        if path.exists() and not (path / "manifest.json").exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(
        self, step: int, saves: Sequence[tuple[ShardInfo | SentShard | None, str | None]], metrics: dict[str, Any],
        val_loss: float | None, is_best: bool,
    ) -> None:  # fmt: skip
        """Commit the workers' shards as one checkpoint.

        Args:
            step: number of steps done.
            saves: what every worker's ``save`` returned.
            metrics: passed on to ``Saved``.
            val_loss: validation loss of these parameters, if known.
            is_best: whether this checkpoint is the best so far.

        Raises:
            DivergenceError: a parameter or an optimizer state is not finite; the checkpoint is deleted.
            CheckpointError: it cannot be written to disk.
        """
        path = step_directory(self._root, step)
        broken = next((key for _, key in saves if key is not None), None)
        if broken is not None:
            shutil.rmtree(path, ignore_errors=True)
            raise self.diverged(step, f"{broken} is not finite after the update")
        meta: dict[str, Any] = {"job": self._job.name}
        if val_loss is not None:
            meta[LOSS] = val_loss
        commit(path, step, [received(path, shard) for shard, _ in saves if shard is not None], meta)
        self._committed = (step, path)
        if is_best:
            keep_best(self._root, path)
        self._log.event("checkpoint", step=step, path=str(path), best=is_best)
        self._saved(step, path, {"step": step, **metrics})

    def discard(self, step: int, refs: list[Any]) -> None:
        """Delete what queued saves have written, because it will not be committed."""
        _, late = ray.wait(refs, num_returns=len(refs), timeout=DISCARD_S)
        if not late:
            shutil.rmtree(step_directory(self._root, step), ignore_errors=True)

    def diverged(self, step: int, what: str) -> DivergenceError:
        """Make the error for a step whose numbers are not finite; it names the checkpoint that a resume begins with."""
        fix = "lower train.lr, or set a longer warm-up" + (" or train.clip" if self._job.train.clip is None else "")
        if self._committed is None:
            return DivergenceError(f"step {step}", what, f"{fix}; there is no earlier checkpoint, so train anew")
        done, path = self._committed
        return DivergenceError(f"step {step}", what, f"{fix}; --resume then continues from step {done} ({path})")
