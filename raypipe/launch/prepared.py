"""What preparing a job comes to: the job with its plan, and then all that a run needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.job.spec import JobSpec
from raypipe.launch.job_model import JobModel
from raypipe.observe.summary import OF_TEXT, Units
from raypipe.plan.plan import Plan
from raypipe.schedule.ir import Schedule

if TYPE_CHECKING:
    from raypipe.models import LayeredModel, Task


@dataclass(frozen=True, slots=True)
class Planned:
    """A job with the plan that it runs, and the step that the plan makes."""

    job: JobSpec
    """With the plan's ``parallel`` keys."""
    model: JobModel
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job checked and made ready: everything that can be wrong with the request has been looked at."""

    job: JobSpec
    model: LayeredModel
    """For the prepared data."""
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""
    directory: Path
    resume: bool
    units: Units = OF_TEXT


def units_of(task: Task, job: JobSpec, data: Path) -> Units:
    """What the loss and the throughput of the data prepared in the folder ``data`` are counted in."""
    from raypipe.data import counts_tokens

    return Units(task.unit, "tokens" if counts_tokens(job, data) else "samples")
