"""The results of preparing a job: the job with its plan, and then everything that a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.job.spec import JobSpec
from raypipe.launch.job_model import JobModel
from raypipe.observe.run_record import OF_TEXT, Units
from raypipe.plan.plan import Plan
from raypipe.schedule.ir import Schedule

if TYPE_CHECKING:
    from raypipe.models import LayeredModel, Task
    from raypipe.runtime.validation.metrics import ValidationMetrics


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, its plan, and the schedule of the plan."""

    job: JobSpec
    """The job with the plan's ``parallel`` keys."""
    model: JobModel
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that is ready to run: all errors that a request can have were checked."""

    job: JobSpec
    model: LayeredModel
    """The model for the prepared data."""
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""
    directory: Path
    resume: bool
    asked: JobSpec
    """The job as it was given: its ``parallel`` keys leave to the planner what the plan has decided."""
    units: Units = OF_TEXT
    validation: ValidationMetrics | None = None
    """Functions of the Python API for figures of a validation."""


def units_of(task: Task, job: JobSpec, data: Path) -> Units:
    """Return the units of loss and throughput for the data prepared in the folder ``data``."""
    from raypipe.data import counts_tokens

    return Units(task.unit, "tokens" if counts_tokens(job, data) else "samples")
