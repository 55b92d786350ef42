"""Train a job, from the job file to a finished run; used by the command line, Ray jobs and the Python API.

``prepare_run`` checks the request, finds the plan and creates the run directory; ``run`` (or ``execute``) starts Ray
Train and follows it to the end. The parts are in ``raypipe/launch/``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError, nearest
from raypipe.job.rules.no_effect import OUT, UNMASKED
from raypipe.job.spec import JobSpec
from raypipe.launch.loggers import check_loggers
from raypipe.launch.plans import given_plan, kept_plan, make_plan, planned_as_asked, planned_by_measuring, with_plan
from raypipe.launch.prepared import JobModel, Planned, Prepared, check_groups, units_of
from raypipe.launch.run import execute, run
from raypipe.launch.run_directory import check_resume, claim, mend, note, run_directory, saved_job, unusable
from raypipe.machine_code import compile_ahead
from raypipe.observe.run_dir import RECORD, place, put_aside, stillborn
from raypipe.plan.joint.better_plans import load_kernels
from raypipe.plan.shard_ways import check_statistics
from raypipe.signals import end_on_signals

if TYPE_CHECKING:
    from raypipe.models import LayeredModel
    from raypipe.runtime.validation.metrics import ValidationMetrics

__all__ = ["Prepared", "claim", "execute", "make_plan", "prepare_run", "run", "saved_job", "with_plan"]

Say = Callable[[str], None]


@end_on_signals()
def prepare_run(
    job: JobSpec,
    directory: Path | None,
    resume: bool,
    plan_file: Path | None = None,
    dashboard_port: int | None = None,
    say: Say = lambda _: None,
    beside: Mapping[str, Any] = MappingProxyType({}),
    validation: ValidationMetrics | None = None,
) -> Prepared:
    """Check the request, make the plan and create the run directory.

    If the planner chooses the plan (``parallel: auto``), this starts Ray and profiles the devices; otherwise Ray is not
    started.

    Args:
        job: the job.
        directory: the run directory; None for a new one.
        resume: whether to resume the run in ``directory``.
        plan_file: a plan to run; None to use the job's ``parallel`` keys.
        dashboard_port: port of Ray's dashboard; None for none.
        say: called with notes and the progress of planning.
        beside: ``parallel`` keys given together with ``plan_file``.
        validation: functions for figures of a validation, instead of those that ``train.metrics`` names.

    Raises:
        SpecError, ScheduleError: something is wrong with the request.
        CheckpointError: ``train.checkpoint_storage`` cannot be read.
        RunError: a device died while it was profiled.
    """
    check_loggers(job)
    _check_compiler(job)
    if directory is not None:
        directory = place(directory)
    empty = directory is not None and stillborn(directory)
    resume = resume and not empty
    if job.train.elastic is not None and (plan_file is not None or not job.parallel.auto):
        raise SpecError(
            "train.elastic",
            "there is nothing left to choose for other devices: the plan is given",
            "use parallel: {auto: true}, with the keys that every plan must keep, and no --plan",
        )
    planned = _planned_at_once(job, directory if resume else None, plan_file, beside, say)
    if planned is None:
        compile_ahead(load_kernels)
    model = JobModel(job) if planned is None else planned.model
    _check_metrics(job, model, validation)
    if job.data.mask != type(job.data).model_fields["mask"].default and not model.declared.task.masks:
        raise SpecError("data.mask", UNMASKED, OUT)
    if job.train.groups:
        check_groups(job.train, model.declared, say)
    shard = (job if planned is None else planned.job).parallel.shard
    check_statistics(shard, shard != "none" and model.declared.batch_statistics)

    where = run_directory(job, directory, resume)
    data = where / "data"
    if empty:
        put_aside(where)
        say(f"{where}: the run in it ended before its first step; starting a new run there")
    if job.train.checkpoint_storage is not None:
        _check_storage(job.train.checkpoint_storage)
    notices = check_resume(job, where, say) if resume else []
    with ExitStack() as on_error:
        try:
            if resume:
                mend(where, say)
                note(where, notices)
            _prepare_data(model, data, resume)
            if planned is None:
                on_error.callback(_release_measured)
                planned = planned_by_measuring(job, model, where, dashboard_port, say)
            planned.plan.save(where / "plan.json")
            record = json.dumps(planned.job.model_dump(mode="json"), indent=1) + "\n"
            write_whole(where / RECORD, record)
        except OSError as error:
            raise unusable(where, error) from None

        layers = model.prepared(data)
        for notice in () if resume else layers.notices:
            say(notice)
        _check_slices(planned.plan.parallel.slices, layers, data, job, validation)
        units = units_of(layers.task, planned.job, data)
        on_error.pop_all()
    return Prepared(planned.job, layers, planned.plan, planned.schedule, where, resume, job, units, validation)


def _release_measured() -> None:
    """Release the devices that wait for the run since they were measured for it."""
    from raypipe.runtime.hosts.reserve import end_idle

    end_idle()


def _check_slices(
    slices: int, model: LayeredModel, data: Path, job: JobSpec, validation: ValidationMetrics | None
) -> None:
    """Raise an error if the plan cuts micro-batches along a sequence and this job cannot."""
    if slices == 1:
        return
    from raypipe.data import open_data
    from raypipe.runtime.validation.metrics import validation_metrics

    model.slice_lengths(slices)
    if open_data(data, model.task).lengths("train", job.train.seed, 0, job.train.batch):
        why = "the samples differ in length, and slices of a micro-batch are of one length"
        raise SpecError("parallel.slices", why, "use slices: 1, or samples of one length")
    if (validation or validation_metrics(job.train)) is not None:
        why = "a micro-batch's predictions come in slices, and functions for figures want them whole"
        raise SpecError("train.metrics", why, "leave it out, or use parallel.slices: 1")


def _check_compiler(job: JobSpec) -> None:
    """Raise an error if the job wants stages compiled and this host cannot."""
    from raypipe.runtime.compiled.toolchain import missing_toolchain

    if job.train.compile == "inductor" and (why := missing_toolchain()) is not None:
        raise SpecError(
            "train.compile", why, "install g++ and Python's headers (or name another compiler in CXX), or use none"
        )


def _check_metrics(job: JobSpec, model: JobModel, validation: ValidationMetrics | None) -> None:
    """Raise an error if figures of a validation are asked for that nothing can compute."""
    from raypipe.runtime.validation.metrics import validation_metrics

    best = job.train.best_metric
    if (validation or validation_metrics(job.train)) is not None:
        if not model.declared.task.predicts:
            why = "the model ends with its loss, so there are no predictions"
            raise SpecError("train.metrics", why, "leave it out, or train with model.loss: task")
        return
    figures = model.declared.task.figures if best != "loss" else (best,)
    if not figures:
        why = f"{best}, but no function computes figures of a validation"
        raise SpecError("train.best_metric", why, "give the function in train.metrics, or use loss")
    if best not in figures:
        why = f"{best} is not among the figures of the loss function, {', '.join(figures)}"
        raise SpecError("train.best_metric", why, nearest(best, figures))


def _check_storage(uri: str) -> None:
    from raypipe.checkpoint import Storage

    Storage(uri).check()


def _planned_at_once(
    job: JobSpec, run_to_resume: Path | None, plan_file: Path | None, beside: Mapping[str, Any], say: Say
) -> Planned | None:
    """The plan that is given, kept from the run to resume, or made from the job's keys; None if the planner chooses."""
    if plan_file is not None:
        return given_plan(job, plan_file, beside, say)
    if job.train.elastic is not None:  # the devices may be others by now
        return None
    if run_to_resume is not None and (kept := kept_plan(job, run_to_resume, say)) is not None:
        return kept
    return None if job.parallel.auto else planned_as_asked(job, JobModel(job))


def _prepare_data(model: JobModel, data: Path, resume: bool) -> None:
    """Prepare the job's data; a resumed run keeps the data that it started with."""
    from raypipe.data import check_placeholders, extend_order, has_short_steps, is_prepared, prepare_data

    if resume and is_prepared(data):
        extend_order(model.job, model.declared.task, data)
    else:
        prepare_data(model.job, model.declared.task, data)
        check_placeholders(data, model.declared.placeholders)
    if model.declared.batch_statistics and has_short_steps(data):
        why = "a mini-batch is short, and what this model computes of a row depends on the others of its micro-batch"
        fix = "use mini-batches that divide the rows, or dataloader_drop_last (an order without short ones)"
        raise SpecError("data.order", why, fix)
