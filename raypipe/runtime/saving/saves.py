"""The saves of an attempt: begun by all workers between two steps, written beside the next ones, committed by a thread.

A save is in flight from when all workers have copied their state until its manifest is written. At most one is: a
worker begins another only when its last write has ended, so all shards of the save before are there by then. What a
worker dies with is lost; the checkpoint before it stands until the manifest of the next is written.

A checkpoint is committed whole or not at all, and the best one is kept (``RunCheckpoints``).
"""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from raypipe.checkpoint import LOSS, ShardInfo, best, commit, forget_best, keep_best, step_directory
from raypipe.checkpoint.write import NAME
from raypipe.errors import DivergenceError, RaypipeError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.runtime.executor.step import StepResult, Written
from raypipe.runtime.hosts.node_files import SentShard, received
from raypipe.runtime.recovery.nonfinite import LEFT_OUT, NonFiniteError
from raypipe.runtime.recovery.replacement import outcomes
from raypipe.runtime.state.shard_writer import SaveBegun, writes_of
from raypipe.runtime.worker.worker_group import LOOK_S, WorkerGroup

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


SAID_S = 0.5
"""Longest wait for the write of the save before that is not worth a notice."""


@dataclass(slots=True)
class Save:
    """One save, from the driver's point of view."""

    number: int
    step: int
    """Number of steps done."""
    folder: Path
    ranks: int
    val_loss: float | None = None
    """Validation loss of the saved parameters, if known."""
    score: float | None = None
    """Score of that validation (``early_stop.score``)."""
    best: bool = False
    """Whether this checkpoint is the best so far."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Passed on to ``Saved``."""
    stall_s: float = 0.0
    """Seconds in which the slowest worker could not train."""
    write_s: float = 0.0
    """Seconds in which the slowest worker wrote."""
    shards: dict[int, Future[ShardInfo | None]] = field(default_factory=dict)
    """By rank, what was written; the thread puts what comes from other nodes into the folder."""
    committed: Future[None] | None = None


class Saves:
    """Begins the saves of one attempt, hears of their writes, and has them committed."""

    def __init__(self, checkpoints: RunCheckpoints, log: RunLog) -> None:
        self.checkpoints, self._log = checkpoints, log
        self.newest = -1
        """Number of steps done at the newest save that has begun, unless it was lost."""
        self.overdue = False
        """Whether a save was lost, so that another one is due as soon as possible."""
        self._numbers = itertools.count()
        self._in_flight: list[Save] = []
        """The oldest first; a second one is here only until the first is committed."""
        self._dropped: list[Path] = []
        """Folders of saves that will not be committed, which workers may still be writing in."""
        self._folders: set[Path] = set()
        """All folders of this attempt."""
        self._said = False
        self._thread = ThreadPoolExecutor(1, "raypipe-commit")

    def call(self, workers: WorkerGroup, step: int) -> tuple[Save, list[Any]]:
        """Have all workers begin a save after the steps that are queued; return it with the calls' references."""
        folder = self.checkpoints.folder(step, self._folders)
        save = Save(next(self._numbers), step, folder, len(workers.actors))
        self._folders.add(folder)
        self._dropped = [other for other in self._dropped if other != folder]
        self.overdue = False
        return save, workers.call("save", save.folder, save.number)

    def begun(self, save: Save, results: Sequence[SaveBegun], metrics: dict[str, Any]) -> None:
        """Take in that all workers have begun a save.

        Raises:
            NonFiniteError: a parameter or an optimizer state is not finite.
            CheckpointError: the save before cannot be written to disk.
        """
        save.metrics = metrics
        save.stall_s = max(r.stall_s for r in results)
        self._in_flight.append(save)
        self.heard(results)
        if len(self._in_flight) > 1:
            self._settle(self._in_flight[0])
        broken = next((r.broken for r in results if r.broken is not None), None)
        if broken is not None:
            self._drop(save)
            raise NonFiniteError(save.step, f"{broken} is not finite after the update")
        self.newest = save.step
        waited = max(r.waited_s for r in results)
        self._log.event("checkpoint_begun", step=save.step, stall_s=save.stall_s, waited_s=waited)
        if waited > SAID_S and not self._said:
            self._said = True
            message = (
                f"the checkpoint of step {save.step} waited {waited:.1f} s until the one before was written: "
                "train.checkpoint_every asks for more than this storage takes"
            )
            self._log.event("notice", message=message)
        self.poll()

    def heard(self, results: Iterable[StepResult | SaveBegun | Written | None]) -> None:
        """Take in the writes that workers report with what they do; None stands for a result that was lost."""
        for one in writes_of(results):
            save = next((s for s in self._in_flight if s.number == one.number), None)
            if save is None or one.rank in save.shards:  # it was dropped, or that is known
                continue
            save.write_s = max(save.write_s, one.seconds)
            save.shards[one.rank] = self._thread.submit(self._receive, save.folder, one.shard)
            if len(save.shards) == save.ranks:
                save.committed = self._thread.submit(self._commit, save)

    @staticmethod
    def _receive(folder: Path, shard: ShardInfo | SentShard | None) -> ShardInfo | None:
        return None if shard is None else received(folder, shard)

    def _commit(self, save: Save) -> None:
        shards = [shard for one in save.shards.values() if (shard := one.result()) is not None]
        self.checkpoints.commit(save.step, shards, save.val_loss, save.best, save.score)

    def poll(self) -> None:
        """Tell of the saves that have been committed.

        Raises:
            CheckpointError: one cannot be written to disk.
        """
        while self._in_flight and (done := self._in_flight[0].committed) is not None and done.done():
            self._settle(self._in_flight[0])

    def _settle(self, save: Save) -> None:
        """Wait until a save whose shards are all there is committed, and tell of it."""
        try:
            if save.committed is None:
                raise RayError("a shard is missing")
            save.committed.result()
        except RayError:  # it was in the memory of a worker that has died since
            self._lose(save, "a worker died that had not handed in its shard")
            return
        self._in_flight.remove(save)
        self.checkpoints.committed(save.step, save.metrics, save.best, save.stall_s, save.write_s)

    def finish(self, workers: WorkerGroup, timeout_s: float) -> None:
        """Wait until everything is committed, or deleted where it will not be; ``timeout_s``: for answers.

        Raises:
            TransportError: a worker does not answer.
            ray.exceptions.RayActorError: a worker died.
            CheckpointError: a checkpoint cannot be written to disk.
        """
        if not self._in_flight and not self._dropped:
            return
        self._wait(workers, timeout_s)
        calls = workers.call("end_save")
        self.heard(outcomes(calls))
        ray.get(calls)
        self._end()

    @staticmethod
    def _wait(workers: WorkerGroup, timeout_s: float) -> None:
        """Wait until all workers have ended their writes, however long they take.

        They are asked again and again, since one call would not tell a process that writes from one that is stopped.
        """
        while any(workers.answers(workers.call("is_writing", LOOK_S), timeout_s)):
            pass

    def drain(
        self, workers: WorkerGroup, called: Iterable[tuple[Save | None, Sequence[Any]]], timeout_s: float
    ) -> None:
        """As ``finish``, where the run fails: what can be committed is, and nothing new is begun.

        Args:
            workers: the worker group.
            called: what workers report with the calls that have not been collected, in order (``heard``); with those
                that begin a save, that save.
            timeout_s: for answers.
        """
        for save, reports in called:
            self.heard(reports)
            if save is not None:
                self._dropped.append(save.folder)
        with suppress(RayError, RaypipeError):  # the shards of the others may be there
            self._wait(workers, timeout_s)
        calls = workers.call("end_save")
        self.heard(outcomes(ray.wait(calls, num_returns=len(calls), timeout=LOOK_S)[0]))
        self._in_flight = [save for save in self._in_flight if len(save.shards) == save.ranks]
        self._end()

    def _end(self) -> None:
        while self._in_flight:
            self._settle(self._in_flight[0])
        for folder in self._dropped:
            self.checkpoints.delete(folder)
        self._dropped.clear()

    def lost(self, ranks: Iterable[int]) -> bool:
        """Give up the saves that dead workers had not written yet; return whether one of them was to be the best."""
        dead = set(ranks)
        gone = [save for save in self._in_flight if dead - save.shards.keys()]
        for save in gone:
            self._lose(save, "a worker died while it wrote its shard")
        return any(save.best for save in gone)

    def uncollected(self, step: int, done: int) -> None:
        """Note that a save was lost before all workers had begun it; the run goes on after ``done`` steps."""
        if step < done:
            self._say_lost(step, "a worker died before it had copied its state")
        self.overdue = True  # where nothing has been done since, the same save

    def _lose(self, save: Save, why: str) -> None:
        self._drop(save)
        if self.newest == save.step:
            self.newest = -1
        self._say_lost(save.step, why)

    def _say_lost(self, step: int, why: str) -> None:
        self.overdue = True
        self._log.event("notice", message=f"the checkpoint of step {step} is given up, {why}; another one follows")

    def _drop(self, save: Save) -> None:
        self._in_flight.remove(save)
        self._dropped.append(save.folder)

    def close(self) -> None:
        """Wait for what is being committed; the attempt has ended, however it did."""
        self._thread.shutdown(wait=True)
        with suppress(Exception):
            self.poll()
