"""A run as its directory tells it, while it goes on or afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import SpecError
from raypipe.files import read_json, short
from raypipe.observe.run_dir import RECORD, is_run
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.observe.summary import STEP, Units, summarise
from raypipe.observe.timelines import FILE as TIMELINE
from raypipe.plan.reasons import gib

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


class MemoryRow(NamedTuple):
    """One device, or with tensor parallelism one rank of it."""

    name: str
    planned_bytes: float | None
    """Of the planner's prediction; None if the plan was given."""
    measured_bytes: float | None
    """Peak of the whole run; None until the run has finished."""
    limit_bytes: float | None


def memory_rows(run: RunRecord) -> list[MemoryRow]:
    """Return a row per rank; empty if memory was neither planned nor measured.

    The planner predicts one data-parallel copy of D devices; device ``w * D + d`` of copy ``w`` has device ``d``'s
    prediction.
    """
    decision, finished = run.last("planned") or {}, run.last("finished") or {}
    chosen: dict[str, Any] = next(iter(decision.get("candidates") or []), {})
    planned, measured = chosen.get("memory_bytes") or [], finished.get("memory_bytes") or []
    tensor = run.parallel.get("tensor") or 1
    count = len(measured) or len(planned) * (run.parallel.get("replicas") or 1) * tensor
    rows = []
    for rank in range(count):
        device = rank // tensor
        name = f"device {device}" + (f", tensor rank {rank % tensor}" if tensor > 1 else "")
        expected = planned[device % len(planned)] if planned else None
        rows.append(MemoryRow(name, expected, measured[rank] if measured else None, chosen.get("capacity_bytes")))
    return rows


def comparison_lines(run: RunRecord) -> list[str]:
    """Return step time, bubbles and peak memory, predicted and measured; what is not known is left out."""
    summary, predicted = run.summary(), run.last("predicted") or {}
    lines = [f"run              {run.name}: {run.state()}, {summary['steps']} steps"]
    if (measured_s := summary["measured_step_s"]) is not None:
        lines.append(f"step measured    {measured_s:.4f} s (median)")
        for word, value in (("planned", run.plan.get("predicted_step_s")), ("predicted", predicted.get("step_s"))):
            if value is not None:
                lines.append(f"step {word:<11} {value:.4f} s ({value / measured_s - 1:+.1%})")
        beside = f" (predicted {predicted['bubble_ratio']:.1%})" if predicted.get("bubble_ratio") is not None else ""
        lines.append(f"bubbles          {summary['bubble_ratio']:.1%}{beside}")
    for row in memory_rows(run):
        known = [
            f"{gib(size)} {word}"
            for size, word in ((row.planned_bytes, "planned"), (row.measured_bytes, "measured"))
            if size is not None
        ]
        lines.append(f"{row.name:<16} {', '.join(known)}")
    return lines
