"""Train a job: from the job file to a finished run. The command line and Ray jobs both come through here.

``prepare_run`` checks the request, finds the plan and lays out the run directory; ``run`` (or ``execute``) starts Ray
Train and follows it to the end. The parts are in ``raypipe/launch/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from raypipe.atomic_write import write_whole
from raypipe.job.spec import JobSpec
from raypipe.launch.job_model import JobModel
from raypipe.launch.plan_file import given_plan, kept_plan
from raypipe.launch.plans import make_plan, planned_as_asked, planned_by_measuring, with_plan
from raypipe.launch.prepared import Planned, Prepared, units_of
from raypipe.launch.resume import check_resume, mend
from raypipe.launch.run import execute, run
from raypipe.launch.run_directory import claim, run_directory, saved_job, unusable
from raypipe.observe.run_dir import RECORD, place, put_aside, stillborn

__all__ = ["Prepared", "claim", "execute", "make_plan", "prepare_run", "run", "saved_job", "with_plan"]

Say = Callable[[str], None]


def prepare_run(
    job: JobSpec, directory: Path | None, resume: bool, plan_file: Path | None = None,
    dashboard_port: int | None = None, say: Say = lambda _: None,
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> Prepared:  # fmt: skip
    """Check everything that can be checked before Ray starts, and lay out the run directory.

    ``beside`` are ``parallel`` keys that were asked for beside ``plan_file``.

    Where the plan is left to the planner (``parallel: auto``), start Ray, measure, and choose it; ``say`` is told how
    that goes.

    Raises:
        SpecError, ScheduleError: whatever is wrong with the request, one error.
        RunError: a device died while it was measured.
    """
    if directory is not None:
        directory = place(directory)
    empty = directory is not None and stillborn(directory)
    resume = resume and not empty
    planned = _planned_at_once(job, directory if resume else None, plan_file, beside, say)
    model = JobModel(job) if planned is None else planned.model

    where = run_directory(job, directory, resume)
    data = where / "data"
    if empty:
        put_aside(where)
        say(f"{where}: the run in it ended before its first step; this one begins there anew")
    if resume:
        check_resume(job, where)
    try:
        if resume:
            mend(where, say)
        _prepare_data(model, data, resume)
        if planned is None:
            planned = planned_by_measuring(job, model, where, dashboard_port, say)
        planned.plan.save(where / "plan.json")
        record = json.dumps(planned.job.model_dump(mode="json"), indent=1) + "\n"
        write_whole(where / RECORD, record)
    except OSError as error:
        raise unusable(where, error) from None

    layers = model.prepared(data)
    units = units_of(layers.task, planned.job, data)
    return Prepared(planned.job, layers, planned.plan, planned.schedule, where, resume, units)


def _planned_at_once(
    job: JobSpec, run_to_resume: Path | None, plan_file: Path | None, beside: Mapping[str, Any], say: Say
) -> Planned | None:  # fmt: skip
    """The plan that is given, kept from the run to resume, or made as asked; None where devices must be measured."""
    if plan_file is not None:
        return given_plan(job, plan_file, beside, say)
    if run_to_resume is not None and (kept := kept_plan(job, run_to_resume, say)) is not None:
        return kept
    return None if job.parallel.auto else planned_as_asked(job, JobModel(job))


def _prepare_data(model: JobModel, data: Path, resume: bool) -> None:
    """Prepare the job's data, unless a resumed run has them: it goes on with the data it began with."""
    from raypipe.data import is_prepared, prepare_data

    if not (resume and is_prepared(data)):
        prepare_data(model.job, model.declared.task, data)
