"""Use an existing plan: from a file that the user gives, or from the directory of the run to resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import RequestError, ScheduleError, SpecError
from raypipe.graph.stages.links import check_order, stage_ends
from raypipe.job.parallel_spec import JOBS_OWN
from raypipe.job.spec import JobSpec
from raypipe.launch.plans import with_plan
from raypipe.launch.prepared import JobModel, Planned
from raypipe.observe.run_dir import set_aside
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.schedule.ir import Schedule

if TYPE_CHECKING:
    from raypipe.models import LayeredModel


def given_plan(job: JobSpec, plan_file: Path, beside: Mapping[str, Any], say: Callable[[str], None]) -> Planned:
    """Read the plan for a job from a file.

    Args:
        job: the job.
        plan_file: the plan file.
        beside: ``parallel`` keys given together with the plan; they must agree with it.
        say: called with notes for the user.

    Raises:
        SpecError: the file is not a plan, or the plan is for another model or contradicts ``beside`` or the job's
            rules.
        ScheduleError: the plan's schedule cannot run, or does not fit ``train.batch``.
    """
    plan = _beside(load_plan(plan_file), beside, plan_file)
    try:
        job = with_plan(job, plan)
    except SpecError as error:
        if not error.where.startswith("parallel"):
            raise  # the error is in the job, not in the plan
        raise SpecError(f"{plan_file}: {error.where}", error.why, error.fix) from None
    except ScheduleError as error:
        raise _in_file(error, plan_file) from None
    model = JobModel(job)
    schedule = _checked_schedule(plan, job, model.declared, plan_file)
    return Planned(job, model, _checked_prediction(plan, job, plan_file, say), schedule)


def kept_plan(job: JobSpec, directory: Path, say: Callable[[str], None] = lambda _: None) -> Planned | None:
    """Read the plan of the run to resume if it was chosen or searched, because planning again could give another plan.

    Args:
        job: the job.
        directory: the run directory.
        say: called with notes for the user.

    Returns:
        The plan, or None if there is none to keep: the job's keys or batch now need another one, or the file is
        damaged. ``say`` reports a plan that does not fit or is damaged.

    Raises:
        SpecError: the plan was made for another model.
    """
    parallel = job.parallel
    if not (parallel.auto or parallel.schedule == "auto" or parallel.replans):
        return None
    path = directory / "plan.json"
    if not path.exists():
        return None
    try:
        plan = load_plan(path)
    except SpecError as error:  # checkpoints do not depend on the plan, so the run can still resume
        say(f"note: {error.where} {error.why}; renamed it {set_aside(path).name}; planning the run again")
        return None
    # Replanning may have changed ``sync`` together with the order (plan.online.better_order).
    asked = plan.parallel.model_copy(update={"sync": job.parallel.sync})
    if not (job.parallel.allows(plan.parallel) if job.parallel.auto else asked == job.parallel):
        return None
    try:
        job = with_plan(job, plan)
        schedule = build_schedule(plan, job.train.batch)
    except RequestError as error:
        say(f"note: {path} does not fit this job, so a new plan is made: {error.where} {error.why}")
        return None
    return Planned(job, JobModel(job), _checked_prediction(plan, job, path, say), schedule)


def _beside(plan: Plan, given: Mapping[str, Any], plan_file: Path) -> Plan:
    """Apply the ``parallel`` keys that the job decides even if a plan is given, and check all others.

    Raises:
        SpecError: a given key differs from the plan's decision.
    """
    own = {key: value for key, value in given.items() if key in JOBS_OWN}
    for key, value in given.items():
        decided = getattr(plan.parallel, key, None)
        if key not in own and decided != value:
            raise SpecError(
                f"--set parallel.{key}",
                f"{value} contradicts {plan_file}, which decides {decided}",
                "leave out one of them; to plan with it: raypipe autoconfigure JOB.yaml --set ... -o PLAN.json",
            )
    return plan.model_copy(update={"parallel": plan.parallel.model_copy(update=own)})


def _checked_prediction(plan: Plan, job: JobSpec, plan_file: Path, say: Callable[[str], None]) -> Plan:
    """Drop the plan's prediction if it is of another job or of the plan before it was edited.

    Raises:
        SpecError: the plan was made for another model.
    """
    found = plan.differences(job)
    if not found:
        return plan
    key, why = min(found, key=lambda difference: not _other_model(difference[0]))
    if _other_model(key):
        raise SpecError(
            str(plan_file),
            f"was made for another model: {key} {why}",
            "plan this one: raypipe autoconfigure JOB.yaml -o PLAN.json",
        )
    say(f"note: since {plan_file} was planned, {key} {why}; its predicted time and memory no longer apply")
    return plan.model_copy(update={"predicted_step_s": None, "bound_s": None, "made_for": None})


def _other_model(key: str) -> bool:
    return key.startswith("model.") and key != "model.dropout"


def _checked_schedule(plan: Plan, job: JobSpec, model: LayeredModel, plan_file: Path) -> Schedule:
    """Build the plan's schedule after checking its cut against the model's layers, and its edges against both.

    Raises:
        SpecError: the cut does not belong to the model or to the schedule.
        ScheduleError: the schedule cannot run, or does not fit ``train.batch``.
    """
    numbers, layers = [i for stage in plan.cut for i in stage], model.count
    if plan.parallel.placement == "branches":  # a stage is any set of layers
        numbers = sorted(numbers)
    if numbers != list(range(layers)):
        raise SpecError(
            f"{plan_file}: cut",
            f"holds layers {numbers} of a model with layers 0 to {layers - 1}",
            "use a plan made for this job",
        )
    empty = next((s for s, stage in enumerate(plan.cut) if not stage), None)
    if empty is not None:
        raise SpecError(f"{plan_file}: cut", f"gives stage {empty} no layers", "use a plan made for this job")
    try:
        schedule = build_schedule(plan, job.train.batch)
    except ScheduleError as error:
        raise _in_file(error, plan_file) from None
    try:
        check_order(model.results, plan.cut)
        stage_ends(model.results, plan.cut, schedule.graph, schedule.placement[0])
    except ScheduleError as error:
        raise ScheduleError(f"{plan_file}: {error.where}", error.why, error.fix) from None
    return schedule


def _in_file(error: ScheduleError, plan_file: Path) -> ScheduleError:
    """Return an error of a plan's program that begins with the file's name."""
    at = error.where.removeprefix("plan: ")
    inside = [] if at.startswith(("parallel", "program")) else ["program"]
    return ScheduleError(": ".join([str(plan_file), *inside, at]), error.why, error.fix)
