"""Check that a run can be resumed: a checkpoint to continue from, readable logs, and steps left to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raypipe.errors import CheckpointError, SpecError
from raypipe.job.spec import JobSpec
from raypipe.launch.run_directory import saved_job
from raypipe.observe.run_dir import CHECKPOINTS, RECORD, mend_logs
from raypipe.observe.run_log import RunLog


def check_resume(job: JobSpec, directory: Path, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """Check that there is a complete checkpoint of the same model and something left to train.

    Where the directory has none, the newest copy is fetched from ``train.checkpoint_storage``; ``say`` reports it, and
    the notice of each newer checkpoint that is damaged. Returns these notices.

    Raises:
        CheckpointError: the storage cannot be read, or the best checkpoint is damaged or gone.
        SpecError: there is no complete checkpoint, the model differs, or the run has stopped early or done all steps.
    """
    from raypipe.checkpoint import Storage, best, latest, open_checkpoint
    from raypipe.runtime.early_stop import patience_of

    root = directory / CHECKPOINTS
    found, notices = latest(root)
    if found is None and job.train.checkpoint_storage is not None:
        storage = Storage(job.train.checkpoint_storage)
        found, skipped = storage.fetch(root)
        notices += skipped
        if found is not None:
            say(f"resuming from {storage.name}/{found.name}")
    if found is None:
        newest = max(root.glob("step-*"), default=None)
        if newest is not None:
            try:
                open_checkpoint(newest)
            except CheckpointError as error:
                raise SpecError(error.where, error.why, error.fix) from None
        why = "; ".join(notices) if notices else "holds no checkpoint"
        raise SpecError(str(root), why, "start without --resume, in a new --run-dir")
    for notice in notices:
        say(f"note: {notice}")
    if job.train.keeps_best:
        best(root)
    saved = directory / RECORD
    if saved.exists() and saved_job(directory).model != job.model:
        raise SpecError("model", f"differs from the run's in {saved}", "resume with the model that was trained")
    step = open_checkpoint(found, verify=False).step
    if job.train.early_stop is not None:
        patience = patience_of(directory, job.train, step)
        if patience.exhausted:
            raise SpecError(
                "train.early_stop",
                f"the run stopped early after {step} steps: {patience}",
                "to train on, raise train.early_stop.patience, lower its target, or set train.early_stop to null",
            )
    if step >= job.train.steps:
        raise SpecError(
            "train.steps", f"is {job.train.steps}, and the run has done {step}", "raise train.steps to train on"
        )
    return notices


def mend(directory: Path, say: Callable[[str], None]) -> None:
    """Repair files that a killed run may have left half written: its logs and Ray Train's state."""
    from raypipe.runtime.cluster.ray_snapshot import check_snapshot

    mend_logs(directory, say)
    check_snapshot(directory, say)


def note(directory: Path, notices: list[str]) -> None:
    """Put notices that have been shown into the run's events."""
    if not notices:
        return
    log = RunLog(directory)
    for notice in notices:
        log.event("notice", message=notice)
    log.close()
