"""A run as its directory tells it, while it goes on or afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError
from raypipe.files import read_json, short
from raypipe.observe.run_dir import RECORD, is_run
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.observe.summary import STEP, Units, summarise
from raypipe.observe.timelines import FILE as TIMELINE

PLAN = "plan.json"
OF_PLAN = ("schedule", "stages", "replicas", "microbatch")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run directory's files; what a run has not written yet is empty."""

    directory: Path
    job: dict[str, Any]
    plan: dict[str, Any]
    timelines: dict[str, Any]
    """``predicted`` and ``measured``, as ``observe.timelines`` writes them."""
    steps: list[dict[str, Any]]
    """The step rows of metrics.jsonl."""
    validations: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damaged: tuple[str, ...]
    """Files that exist but cannot be read, with the reason."""

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.job.get("name") or self.directory.name)

    @property
    def planned_steps(self) -> int | None:
        """``train.steps`` of the job."""
        steps = _section(self.job, "train").get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def parallel(self) -> dict[str, Any]:
        """The ``parallel`` section of the plan."""
        return _section(self.plan, "parallel")

    def last(self, kind: str) -> dict[str, Any] | None:
        """Return the newest event of a kind."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def state(self) -> str:
        """Return what the run is doing, by its last decisive event: ``finished``, ``failed``, ``running`` and so on."""
        words = {
            "finished": "finished",
            "interrupted": "interrupted",
            "failed": "failed",
            "error": "failed",
            "restarted": "restarting",
            "started": "running",
            "run": "starting",
            "waiting": "waiting for devices",
            "resized": "restarting with another plan",
        }
        return next((words[e["event"]] for e in reversed(self.events) if e["event"] in words), "not started")

    def summary(self) -> dict[str, Any]:
        """Return the figures that ``raypipe train --json`` prints for the run."""
        plan = {key: self.parallel.get(key) for key in OF_PLAN}
        made_for = _section(self.plan, "made_for").get("device")
        text = _section(self.job, "data").get("type") in (None, "bytes", "text")
        units = Units() if text else Units("", "tokens or samples")
        return summarise(self.directory, plan, self.plan.get("predicted_step_s"), made_for, units)


@contextmanager
def as_runs_write(directory: Path) -> Iterator[None]:
    """Make one error of what a value of another kind causes in the block, which shows the files of a run directory.

    Raises:
        SpecError: the block raised such an exception.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"its files hold a value that no run writes ({type(error).__name__}: {short(str(error))})"
        raise SpecError(str(directory), why, "restore the file from a copy, or look at another run") from error


def read_run(directory: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        SpecError: there is no run in it.
    """
    if not directory.is_dir():
        raise SpecError(str(directory), "there is no such folder", "give the run directory that raypipe train printed")
    try:
        found = is_run(directory)
    except OSError as error:
        raise SpecError(str(directory), f"can't be read: {error.strerror}", "give a folder that you may read") from None
    if not found:
        raise SpecError(str(directory), "holds no run", "give the run directory that raypipe train printed")
    damaged: list[str] = []

    def read(name: str) -> dict[str, Any]:
        try:
            value = read_json(directory / name)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            damaged.append(f"{name}: {error}")
            return {}
        if not isinstance(value, dict):
            damaged.append(f"{name}: is not an object")
            return {}
        return value

    job, plan, timelines = read(RECORD), read(PLAN), read(TIMELINE)
    rows = read_rows(directory / METRICS)
    return RunRecord(
        directory,
        job,
        plan,
        timelines,
        [r for r in rows if "val_loss" not in r and r.keys() >= STEP],
        [r for r in rows if "val_loss" in r],
        read_rows(directory / EVENTS),
        tuple(damaged),
    )


def _section(of: dict[str, Any], key: str) -> dict[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}
