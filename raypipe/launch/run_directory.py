"""Choose and claim the run directory, and read the job that a run recorded there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raypipe.errors import RaypipeError, SpecError
from raypipe.files import parse_json, read_regular
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import RECORD, check_own, hold, place, stillborn
from raypipe.observe.run_log import METRICS


def run_directory(job: JobSpec, directory: Path | None, resume: bool) -> Path:
    """Claim the directory for the run's files: ``directory``, or a new one named after the job.

    Raises:
        SpecError: ``resume`` without a directory, or as for ``claim``.
    """
    if directory is None:
        if resume:
            raise SpecError("--resume", "needs the directory of the run to resume", "add --run-dir DIR")
        # The working directory of a Ray job is deleted with the job.
        base = Path.home() / "raypipe" / "runs" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else Path("runs")
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
