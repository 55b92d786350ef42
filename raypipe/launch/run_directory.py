"""The directory of a run: chosen and claimed; of a run to resume, its job, its checkpoints and its logs checked."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from raypipe.compat.ray_private import JOB_CONFIG, validate_snapshot
from raypipe.errors import CheckpointError, RaypipeError, SpecError
from raypipe.files import parse_json, read_json, read_regular
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import CHECKPOINTS, RECORD, check_own, hold, mend_logs, place, set_aside, stillborn
from raypipe.observe.run_log import METRICS, log_event


def run_directory(job: JobSpec, directory: Path | None, resume: bool) -> Path:
    """Claim the directory for the run's files: ``directory``, or a new one named after the job.

    Raises:
        SpecError: ``resume`` without a directory, or as for ``claim``.
    """
    if directory is None:
        if resume:
            raise SpecError("--resume", "needs the directory of the run to resume", "add --run-dir DIR")
        # The working directory of a Ray job is deleted with the job.
        base = Path.home() / "raypipe" / "runs" if JOB_CONFIG in os.environ else Path("runs")
        directory = base / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return claim(directory, resume)


def claim(directory: Path, resume: bool) -> Path:
    """Create a run directory, or check that this run may write into it; return its absolute path.

    Raises:
        SpecError: the directory holds another run or other files, or cannot be written.
    """
    directory = place(directory)
    try:
        if not resume and (directory / METRICS).exists() and not stillborn(directory):
            raise SpecError(str(directory), "already holds a run", "add --resume, or give another --run-dir")
        check_own(directory)
        directory.mkdir(parents=True, exist_ok=True)
        hold(directory).close()
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unusable(directory, error) from None
    return directory


def unusable(directory: Path, error: OSError) -> SpecError:
    """Return the error for a directory that the operating system refuses to read or write."""
    inside = str(error.filename or directory).removeprefix(str(directory)).strip("/")
    reason = error.strerror or str(error)
    why = f"{reason}: {inside}" if inside else reason
    return SpecError(str(directory), f"can't be used as run directory: {why}", "give another --run-dir")


def saved_job(directory: Path) -> JobSpec:
    """Read the job that a run recorded in its directory.

    Raises:
        SpecError: the directory holds no run, or the record is damaged.
    """
    path = directory / RECORD
    try:
        record = read_regular(path)
        parse_json(record)
        return JobSpec.model_validate_json(record)
    except FileNotFoundError:
        raise SpecError(str(directory), "holds no run", "give the --run-dir of a `raypipe train`") from None
    except (OSError, ValueError, KeyError, TypeError, RaypipeError):
        raise SpecError(
            str(path), "is not a job record, or is damaged", "start a new run in another --run-dir"
        ) from None


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
    result, notices = latest(root)
    if result is None and job.train.checkpoint_storage is not None:
        storage = Storage(job.train.checkpoint_storage)
        result, skipped = storage.fetch(root)
        notices += skipped
        if result is not None:
            say(f"resuming from {storage.name}/{result.name}")
    if result is None:
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
    check_model(job, directory)
    step = open_checkpoint(result, verify=False).step
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


def check_model(job: JobSpec, directory: Path) -> None:
    """Raise SpecError where a job's model is not that of the run in a directory."""
    saved = directory / RECORD
    if saved.exists() and saved_job(directory).model != job.model:
        raise SpecError("model", f"differs from the run's in {saved}", "resume with the model that was trained")


def mend(directory: Path, say: Callable[[str], None]) -> None:
    """Repair files that a killed run may have left half written: its logs and Ray Train's state."""
    mend_logs(directory, say)
    check_snapshot(directory, say)


def note(directory: Path, notices: list[str]) -> None:
    """Put notices that have been shown into the run's events."""
    for notice in notices:
        log_event(directory, "notice", message=notice)


# Check Ray Train's snapshot: its list of reported checkpoints, which it reads when a run begins in its directory.
#
# Ray Train needs the list only to delete old checkpoints; a run resumes from raypipe's own manifests. A damaged one is
# therefore renamed, so that Ray Train does not fail on it.

SNAPSHOT = "checkpoint_manager_snapshot.json"


def check_snapshot(directory: Path, say: Callable[[str], None]) -> None:
    """Rename the snapshot if Ray Train could not read it, and report that through ``say``.

    Raises:
        OSError: it cannot be renamed.
    """
    path = directory / SNAPSHOT
    if path.exists() and (wrong := _wrong(path)) is not None:
        say(f"note: {path}: {wrong}; it is now {set_aside(path).name}, and the run resumes from its own checkpoints")


def _wrong(path: Path) -> str | None:
    """Say why Ray Train would reject the snapshot; None if it would accept it."""
    try:
        snapshot = read_json(path)
        validate_snapshot(snapshot)
        listed = [one["checkpoint_dir_name"] for one in snapshot["checkpoint_results"]]
        latest = snapshot.get("latest_checkpoint_result")
        pending = snapshot.get("pending_training_results", [])  # older Rays do not list these, nor the indices
        mentioned = [one["checkpoint_dir_name"] for one in (*pending, *([latest] if latest else []))]
        indices = snapshot.get("checkpoint_report_indices", listed)
        consistent = len(listed) == len(indices) and set(listed).issuperset(mentioned)
        consistent = consistent and len(pending) == len(snapshot.get("pending_validation_specs", pending))
    except Exception:  # a damaged file may raise anything here, pydantic's errors included
        return "is damaged"
    if not consistent:
        return "contradicts itself"
    lost = next((name for name in listed if not (path.parent / name).is_dir()), None)
    return None if lost is None else f"names {lost}, which is gone"
