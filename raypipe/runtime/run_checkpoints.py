"""The checkpoints of one attempt at a run: made whole or not at all, the best one kept."""

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

DISCARD_S = 60.0
"""Longest wait for saves that nobody will commit; they are queued behind two steps at most."""

Saved = Callable[[int, Path, dict[str, Any]], None]
"""Told of every complete checkpoint: (step, directory, metrics)."""


class RunCheckpoints:
    """Workers write their shards; this says where, and makes a checkpoint of them."""

    def __init__(self, job: JobSpec, directory: Path, log: RunLog, saved: Saved) -> None:
        self._job, self._root, self._log, self._saved = job, directory / "checkpoints", log, saved
        self._best_loss = math.inf
        """Validation loss of the best checkpoint."""
        self._committed: tuple[int, Path] | None = None
        """The newest checkpoint that a resume would go on from: steps done, and where it is."""

    def resume(self, checkpoint: Path | None, done: int) -> None:
        """Go on from ``checkpoint``, which has ``done`` steps behind it, or start afresh."""
        self._committed = (done, checkpoint) if checkpoint is not None else None
        if self._job.train.keeps_best:
            held = best(self._root)
            if held is not None and held.step > done:  # of steps that will be run again, perhaps by another job
                forget_best(self._root)
            elif held is not None:
                self._best_loss = held.meta[LOSS]

    def improves(self, val_loss: float) -> bool:
        """Whether the parameters that were just validated are the best so far; then they are to be saved."""
        better = val_loss < self._best_loss
        self._best_loss = min(val_loss, self._best_loss)
        return better

    def folder(self, step: int) -> Path:
        """Where the workers shall save after ``step`` steps; free of what an attempt left that died while saving."""
        path = step_directory(self._root, step)
        if path.exists() and not (path / "manifest.json").exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(
        self, step: int, saves: Sequence[tuple[ShardInfo | None, str | None]], metrics: dict[str, Any],
        val_loss: float | None, is_best: bool,
    ) -> None:  # fmt: skip
        """Make a checkpoint of what the workers have saved.

        Args:
            step: steps done.
            saves: what every worker's ``save`` returned.
            metrics: for ``Saved``.
            val_loss: of these parameters, where it is known.
            is_best: the best so far.

        Raises:
            DivergenceError: a parameter or an optimizer's state is not finite; nothing of it is kept.
            CheckpointError: the disk refuses.
        """
        path = step_directory(self._root, step)
        broken = next((key for _, key in saves if key is not None), None)
        if broken is not None:
            shutil.rmtree(path, ignore_errors=True)
            raise self.diverged(step, f"{broken} is not finite after the update")
        meta: dict[str, Any] = {"job": self._job.name}
        if val_loss is not None:
            meta[LOSS] = val_loss
        commit(path, step, [shard for shard, _ in saves if shard is not None], meta)
        self._committed = (step, path)
        if is_best:
            keep_best(self._root, path)
        self._log.event("checkpoint", step=step, path=str(path), best=is_best)
        self._saved(step, path, {"step": step, **metrics})

    def discard(self, step: int, refs: list[Any]) -> None:
        """Remove what queued saves have written: nobody will commit it."""
        _, late = ray.wait(refs, num_returns=len(refs), timeout=DISCARD_S)
        if not late:
            shutil.rmtree(step_directory(self._root, step), ignore_errors=True)

    def diverged(self, step: int, what: str) -> DivergenceError:
        """The error of a step whose numbers are not finite; says what a resume would begin with."""
        fix = "lower train.lr, or set a longer warm-up" + (" or train.clip" if self._job.train.clip is None else "")
        if self._committed is None:
            return DivergenceError(f"step {step}", what, f"{fix}; no checkpoint was written before, so train anew")
        done, path = self._committed
        return DivergenceError(f"step {step}", what, f"{fix}; --resume then goes on from step {done} ({path})")
