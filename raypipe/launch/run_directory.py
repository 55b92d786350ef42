"""Which directory a run has: a new one, or one that holds nothing but this run. And the job in its record."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raypipe.errors import RaypipeError, SpecError
from raypipe.files import read_regular
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import RECORD, check_own, hold, place, stillborn
from raypipe.observe.run_log import METRICS


def run_directory(job: JobSpec, directory: Path | None, resume: bool) -> Path:
    """Where the run's files go, made and found to be this run's: ``directory``, or a new one with the job's name.

    Raises:
        SpecError: nothing is named to resume, or as ``claim``.
    """
    if directory is None:
        if resume:
            raise SpecError("--resume", "needs the run to resume", "add --run-dir DIR")
        # A Ray job's working directory goes away with the job.
        base = Path.home() / "raypipe" / "runs" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else Path("runs")
        directory = base / f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return claim(directory, resume)


def claim(directory: Path, resume: bool) -> Path:
    """Make a run directory, or see that it is one that this run may write into; returns its absolute path.

    Raises:
        SpecError: it holds a run already, or somebody else's files, or cannot be written.
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
    """The error about a directory that the operating system refuses to read or write."""
    inside = str(error.filename or directory).removeprefix(str(directory)).strip("/")
    reason = error.strerror or str(error)
    why = f"{reason}: {inside}" if inside else reason
    return SpecError(str(directory), f"can't be used as run directory: {why}", "give another --run-dir")


def saved_job(directory: Path) -> JobSpec:
    """The job of a run, from its record.

    Raises:
        SpecError: the directory holds no run, or the record is damaged.
    """
    path = directory / RECORD
    try:
        return JobSpec.model_validate_json(read_regular(path))
    except FileNotFoundError:
        raise SpecError(str(directory), "holds no run", "give the --run-dir of a `raypipe train`") from None
    except (OSError, ValueError, KeyError, TypeError, RaypipeError):
        raise SpecError(str(path), "is no record of a job: damaged", "train anew, in another --run-dir") from None
