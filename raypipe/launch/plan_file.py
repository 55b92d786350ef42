"""The plan of a job that brings one: in a file that the user gives, or kept in the directory of the run to resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import RequestError, ScheduleError, SpecError
from raypipe.job.parallel_spec import JOBS_OWN
from raypipe.job.spec import JobSpec
from raypipe.launch.job_model import JobModel
from raypipe.launch.plans import with_plan
from raypipe.launch.prepared import Planned
from raypipe.observe.run_dir import set_aside
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.schedule.ir import Schedule


def given_plan(
    job: JobSpec, plan_file: Path, beside: Mapping[str, Any], say: Callable[[str], None]
) -> Planned:  # fmt: skip
    """The plan in a file, for this job; ``beside`` are ``parallel`` keys that were asked for beside it.

    Raises:
        SpecError: it is no plan, or of another model, or decides otherwise than ``beside`` or the job's rules.
        ScheduleError: its schedule cannot run, or is not of the job's batch.
    """
    plan = _beside(load_plan(plan_file), beside, plan_file)
    try:
        job = with_plan(job, plan)
    except SpecError as error:
        if not error.where.startswith("parallel"):
            raise  # what the job says of other things
        raise SpecError(f"{plan_file}: {error.where}", error.why, error.fix) from None
    model = JobModel(job)
    schedule = _checked_schedule(plan, job, model.declared.count, plan_file)
    return Planned(job, model, _known(plan, job, plan_file, say), schedule)


def kept_plan(job: JobSpec, directory: Path, say: Callable[[str], None] = lambda _: None) -> Planned | None:
    """The plan of the run to resume where it was chosen or searched: doing so again would find another one.

    None where the job now asks for another one, be it by its batch alone, or where the record of it is damaged; both
    are reported through ``say``.

    Raises:
        SpecError: it was made for another model.
    """
    parallel = job.parallel
    if not (parallel.auto or parallel.schedule == "auto" or parallel.replans):
        return None
    path = directory / "plan.json"
    if not path.exists():
        return None
    try:
        plan = load_plan(path)
    except SpecError as error:  # the checkpoints, which no plan enters, are what a run goes on from
        say(f"note: {error.where} {error.why}; it is now {set_aside(path).name}, and the run is planned again")
        return None
    # When gradients are summed may have changed with the order (plan.online.better_order).
    asked = plan.parallel.model_copy(update={"sync": job.parallel.sync})
    if not (job.parallel.allows(plan.parallel) if job.parallel.auto else asked == job.parallel):
        return None
    try:
        job = with_plan(job, plan)
        schedule = build_schedule(plan, job.train.batch)
    except RequestError as error:
        say(f"note: {path} does not fit this job and is made anew: {error.where} {error.why}")
        return None
    return Planned(job, JobModel(job), _known(plan, job, path, say), schedule)


def _beside(plan: Plan, wishes: Mapping[str, Any], plan_file: Path) -> Plan:
    """The plan with those ``parallel`` keys that its job may give beside it.

    Raises:
        SpecError: a key that the plan has decided otherwise.
    """
    own = {key: value for key, value in wishes.items() if key in JOBS_OWN}
    for key, value in wishes.items():
        decided = getattr(plan.parallel, key, None)
        if key not in own and decided != value:
            raise SpecError(
                f"--set parallel.{key}", f"{value} is asked for, but {plan_file} has decided {decided}",
                "leave out one of them; to plan with it: raypipe autoconfigure JOB.yaml --set ... -o PLAN.json",
            )  # fmt: skip
    return plan.model_copy(update={"parallel": plan.parallel.model_copy(update=own)})


def _known(plan: Plan, job: JobSpec, plan_file: Path, say: Callable[[str], None]) -> Plan:
    """The plan; without its prediction where that is of another job, or of what the plan was before it was edited.

    Raises:
        SpecError: it was made for another model.
    """
    found = plan.differences(job)
    if not found:
        return plan
    key, why = min(found, key=lambda difference: not _other_model(difference[0]))
    if _other_model(key):
        raise SpecError(
            str(plan_file), f"was made for another model: {key} {why}",
            "plan this one: raypipe autoconfigure JOB.yaml -o PLAN.json",
        )  # fmt: skip
    say(f"note: since {plan_file} was planned, {key} {why}; its predicted time and memory do not hold")
    return plan.model_copy(update={"predicted_step_s": None, "made_for": None})


def _other_model(key: str) -> bool:
    return key.startswith("model.") and key != "model.dropout"


def _checked_schedule(plan: Plan, job: JobSpec, layers: int, plan_file: Path) -> Schedule:
    """The plan's step, once its cut is found to be one of a model of so many ``layers``."""
    held = [i for stage in plan.cut for i in stage]
    if held != list(range(layers)):
        raise SpecError(
            f"{plan_file}: cut", f"holds layers {held} of a model with layers 0 to {layers - 1}",
            "use a plan made for this job",
        )  # fmt: skip
    empty = next((s for s, stage in enumerate(plan.cut) if not stage), None)
    if empty is not None:
        raise SpecError(f"{plan_file}: cut", f"gives stage {empty} no layers", "use a plan made for this job")
    try:
        schedule = build_schedule(plan, job.train.batch)
    except ScheduleError as error:
        at = error.where.removeprefix("plan: ")
        inside = ["order"] if plan.order is not None and not at.startswith("order") else []
        raise ScheduleError(": ".join([str(plan_file), *inside, at]), error.why, error.fix) from None
    if len(plan.cut) != schedule.stages:
        raise SpecError(
            f"{plan_file}: cut", f"has {len(plan.cut)} stages, {plan.parallel.schedule} needs {schedule.stages}",
            "use a plan made for this job",
        )  # fmt: skip
    return schedule
