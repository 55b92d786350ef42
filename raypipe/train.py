"""Train a job: from the job file to a finished run. The command line and Ray jobs both come through here."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raypipe.errors import CheckpointError, RaypipeError, RequestError, RunError, ScheduleError, SpecError
from raypipe.files import read_regular
from raypipe.job.recompute_layers import named_layers
from raypipe.job.requested_schedule import base_schedule, is_file
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import (
    CHECKPOINTS,
    RECORD,
    check_own,
    hold,
    mend_logs,
    place,
    put_aside,
    set_aside,
    stillborn,
)
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.observe.summary import OF_TEXT, Units, summarise
from raypipe.plan.plan import JOBS_OWN, Plan, build_schedule, load_plan
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.ir import Schedule
from raypipe.search import search
from raypipe.search.placements import placed

if TYPE_CHECKING:
    from ray.train import Result

    from raypipe.models import LayeredModel

JOB_FILE = RECORD


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job checked and made ready: everything that can be wrong with the request has been looked at."""

    job: JobSpec
    plan: Plan
    directory: Path
    resume: bool
    units: Units = OF_TEXT


def make_plan(job: JobSpec) -> Plan:
    """Cut the model for the job's schedule and check the whole step.

    Raises:
        SpecError: more stages than layers.
        ScheduleError: the schedule does not exist for this shape.
    """
    from raypipe.data import declared_fields
    from raypipe.models import build_model, split_layers

    layers = build_model(job, declared_fields(job.data), tensor_rank=0)
    parallel = job.parallel
    if isinstance(parallel.recompute, tuple):
        numbers = named_layers(parallel.recompute, layers.names)
        parallel = parallel.model_copy(update={"recompute": numbers})
    order: str | None
    if parallel.schedule == "auto":
        placement = placed(parallel.placement, parallel.shape(job.train.batch))
        cut = split_layers(layers, len(placement[0]))
        order = to_text(_searched(job, placement, [sum(layers.flops[i] for i in part) for part in cut]))
    else:
        schedule = base_schedule(parallel, job.train.batch)
        cut = split_layers(layers, schedule.stages)
        if schedule.versions == "stash":
            _refuse_copies(layers, cut)
        order = to_text(schedule) if is_file(parallel.schedule) else None
    plan = Plan(parallel=parallel, cut=tuple(tuple(part) for part in cut), order=order)
    build_schedule(plan, job.train.batch)
    return plan


def _refuse_copies(layers: LayeredModel, cut: list[range]) -> None:
    """PipeDream updates each stage by itself: a parameter that two stages hold would become two."""
    stage_of = {layer: stage for stage, part in enumerate(cut) for layer in part}
    for group in layers.tied:
        if len({stage_of[layer] for layer, _ in group.parameters}) > 1:
            raise SpecError(
                "model", f"pipedream updates stages at different times: copies of {group.name} would differ",
                "use schedule: pipedream-2bw, or a model that ties nothing",
            )  # fmt: skip


def _searched(job: JobSpec, placement: tuple[tuple[int, ...], ...], flops: list[float]) -> Schedule:
    """The order that ``auto`` runs: searched on the stages' analytic costs, B and W as long as F each."""
    largest = max(flops)
    times = tuple(f / largest for f in flops)
    zeros = (0.0,) * len(times)
    costs = CostTable(
        forward=times, input_grad=times, weight_grad=times, recompute=zeros, all_reduce=zeros, update=zeros
    )
    shape = job.parallel.shape(job.train.batch)
    found = search(placement, shape.microbatches, costs, memory_limit=shape.memory_limit)
    return replace(found.schedule, name="auto")


def prepare_run(
    job: JobSpec, directory: Path | None, resume: bool, plan_file: Path | None = None,
    dashboard_port: int | None = None, say: Callable[[str], None] = lambda _: None,
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
    plan: Plan | None = None
    if plan_file is not None:
        plan = _beside(load_plan(plan_file), beside, plan_file)
        try:
            job = with_plan(job, plan)
        except SpecError as error:
            if not error.where.startswith("parallel"):
                raise  # what the job says of other things
            raise SpecError(f"{plan_file}: {error.where}", error.why, error.fix) from None
        _check_cut(plan, job, plan_file)
        plan = _known(plan, job, plan_file, say)
    elif resume and directory is not None and (plan := _chosen_before(job, directory, say)) is not None:
        job = with_plan(job, plan)
        plan = _known(plan, job, directory / "plan.json", say)
    elif not job.parallel.auto:
        plan = make_plan(job)
    from raypipe.data import declared_fields, is_prepared, prepare_data
    from raypipe.models import build_model

    where = _directory(job, directory, resume)
    if empty:
        put_aside(where)
        say(f"{where}: the run in it ended before its first step; this one begins there anew")
    if resume:
        _check_resume(job, where)
    try:
        if resume:
            from raypipe.runtime.cluster.ray_snapshot import check_snapshot

            mend_logs(where, say)
            check_snapshot(where, say)
        if not (resume and is_prepared(where / "data")):  # a resumed run goes on with the data it began with
            prepare_data(job, build_model(job, declared_fields(job.data)).task, where / "data")
        if plan is None:
            plan = _planned(job, where, dashboard_port, say)
            job = with_plan(job, plan)
        plan.save(where / "plan.json")
        (where / JOB_FILE).write_text(json.dumps(job.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(where, error) from None
    return Prepared(job, plan, where, resume, _units(job, where / "data"))


def _units(job: JobSpec, data: Path) -> Units:
    """What the loss and the throughput of the prepared data are counted in."""
    from raypipe.data import counts_tokens, known_fields
    from raypipe.models import build_model

    task = build_model(job, known_fields(data)).task
    return Units(task.unit, "tokens" if counts_tokens(job, data) else "samples")


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


def with_plan(job: JobSpec, plan: Plan) -> JobSpec:
    """The job with a plan's ``parallel`` keys.

    Raises:
        SpecError: the job's rules refuse them.
    """
    return JobSpec.model_validate({**job.model_dump(), "parallel": plan.parallel.model_dump()})


def _planned(job: JobSpec, directory: Path, dashboard_port: int | None, say: Callable[[str], None]) -> Plan:
    """Measure and choose; the decision goes to the run's events."""
    from raypipe.data import declared_fields
    from raypipe.models import build_model
    from raypipe.plan.decision_json import as_json
    from raypipe.profiling.profile_and_plan import profile_and_plan

    statistics = build_model(job, declared_fields(job.data)).batch_statistics
    if statistics and "microbatch" not in job.parallel.given:
        say(
            "note: this model's loss depends on the size of its micro-batches (batch norm, or a loss of its own), "
            "which the planner chooses; parallel.microbatch fixes it"
        )
    decision = profile_and_plan(job, directory, directory / "data", dashboard_port, say)
    told = as_json(decision)
    log = RunLog(directory)
    log.event("planned", **{key: told[key] for key in ("candidates", "searched", "timed", "seconds")})
    log.close()
    return decision.plan


def _chosen_before(job: JobSpec, directory: Path, say: Callable[[str], None] = lambda _: None) -> Plan | None:
    """The plan of the run to resume where it was chosen or searched: doing so again would find another one.

    None where the job now asks for another one, be it by its batch alone, or where the record of it is damaged; both
    are reported through ``say``.
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
    # When gradients are summed may have changed with the order (runtime.better_plan).
    asked = plan.parallel.model_copy(update={"sync": job.parallel.sync})
    if not (job.parallel.allows(plan.parallel) if job.parallel.auto else asked == job.parallel):
        return None
    try:
        build_schedule(plan, with_plan(job, plan).train.batch)
    except RequestError as error:
        say(f"note: {directory / 'plan.json'} does not fit this job and is made anew: {error.where} {error.why}")
        return None
    return plan


def saved_job(directory: Path) -> JobSpec:
    """The job of a run, from its record.

    Raises:
        SpecError: the directory holds no run, or the record is damaged.
    """
    path = directory / JOB_FILE
    try:
        return JobSpec.model_validate_json(read_regular(path))
    except FileNotFoundError:
        raise SpecError(str(directory), "holds no run", "give the --run-dir of a `raypipe train`") from None
    except (OSError, ValueError, KeyError, TypeError, RaypipeError):
        raise SpecError(str(path), "is no record of a job: damaged", "train anew, in another --run-dir") from None


def _check_cut(plan: Plan, job: JobSpec, plan_file: Path) -> None:
    from raypipe.data import declared_fields
    from raypipe.models import build_model

    layers = [i for stage in plan.cut for i in stage]
    expected = build_model(job, declared_fields(job.data), tensor_rank=0).count
    if layers != list(range(expected)):
        raise SpecError(
            f"{plan_file}: cut", f"holds layers {layers} of a model with layers 0 to {expected - 1}",
            "use a plan made for this job",
        )  # fmt: skip
    empty = next((s for s, stage in enumerate(plan.cut) if not stage), None)
    if empty is not None:
        raise SpecError(f"{plan_file}: cut", f"gives stage {empty} no layers", "use a plan made for this job")
    try:
        stages = build_schedule(plan, job.train.batch).stages
    except ScheduleError as error:
        at = error.where.removeprefix("plan: ")
        inside = ["order"] if plan.order is not None and not at.startswith("order") else []
        raise ScheduleError(": ".join([str(plan_file), *inside, at]), error.why, error.fix) from None
    if len(plan.cut) != stages:
        raise SpecError(
            f"{plan_file}: cut", f"has {len(plan.cut)} stages, {plan.parallel.schedule} needs {stages}",
            "use a plan made for this job",
        )  # fmt: skip


def _directory(job: JobSpec, directory: Path | None, resume: bool) -> Path:
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
        raise _unusable(directory, error) from None
    return directory


def _unusable(directory: Path, error: OSError) -> SpecError:
    inside = str(error.filename or directory).removeprefix(str(directory)).strip("/")
    reason = error.strerror or str(error)
    why = f"{reason}: {inside}" if inside else reason
    return SpecError(str(directory), f"can't be used as run directory: {why}", "give another --run-dir")


def _check_resume(job: JobSpec, directory: Path) -> None:
    """What resuming needs: a whole checkpoint, of the same model."""
    from raypipe.checkpoint import latest, open_checkpoint
    from raypipe.runtime.early_stop import patience_of

    root = directory / CHECKPOINTS
    found, notices = latest(root)
    if found is None:
        newest = max(root.glob("step-*"), default=None)
        if newest is not None:
            try:
                open_checkpoint(newest)
            except CheckpointError as error:
                raise SpecError(error.where, error.why, error.fix) from None
        why = "; ".join(notices) if notices else "holds no checkpoint"
        raise SpecError(str(root), why, "start without --resume, in a new --run-dir")
    saved = directory / JOB_FILE
    if saved.exists() and saved_job(directory).model != job.model:
        raise SpecError("model", f"differs from the run's in {saved}", "resume with the model that was trained")
    step = open_checkpoint(found, verify=False).step
    if job.train.early_stop is not None:
        patience = patience_of(directory, job.train.early_stop, step)
        if patience.exhausted:
            raise SpecError(
                "train.early_stop", f"the run has stopped, after {step} steps: {patience}",
                "it is finished; to train on, raise train.early_stop.patience or set train.early_stop to null",
            )  # fmt: skip
    if step >= job.train.steps:
        raise SpecError(
            "train.steps", f"is {job.train.steps}, and the run has done {step}", "raise train.steps to train on"
        )


def execute(prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None]) -> dict[str, Any]:
    """Run to the end and return CONTRACT.md's result; as ``run`` otherwise."""
    return run(prepared, dashboard_port, watch)[1]


def run(prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None]) -> tuple[Result, dict[str, Any]]:
    """Run to the end and return Ray Train's result and CONTRACT.md's; ``watch`` is called twice a second meanwhile.

    Raises:
        SpecError: the cluster can never give what the plan needs.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
        RunError: the run failed for good; the message is the last attempt's.
    """
    with hold(prepared.directory):
        return _run_held(prepared, dashboard_port, watch)


def _run_held(
    prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None]
) -> tuple[Result, dict[str, Any]]:
    from raypipe.runtime.cluster.connect import connect
    from raypipe.runtime.cluster.cores import cores_of_one_host, warning
    from raypipe.runtime.cluster.failure import describe
    from raypipe.runtime.cluster.ray_train import DRIVER_DIED, RunRequest, start_run
    from raypipe.runtime.cluster.reserve import reserve

    directory = prepared.directory
    schedule = build_schedule(prepared.plan, prepared.job.train.batch)
    count = schedule.devices * prepared.plan.parallel.tensor
    devices = connect(count, dashboard_port)
    cores = cores_of_one_host(devices)
    log = RunLog(directory)
    log.event("run", resume=prepared.resume, devices=count, cores=cores)
    if (message := warning(count, cores)) is not None:
        log.event("notice", message=message)

    def waiting(message: str) -> None:
        log.event("waiting", message=message)
        watch()

    try:
        held = reserve(count, devices, prepared.job.train.wait_for_devices_s, waiting)
    finally:
        log.close()
    request = RunRequest(prepared.job, directory, prepared.resume, devices, held)
    failure: list[BaseException] = []
    results: list[Result] = []

    def work() -> None:
        try:
            results.append(start_run(request))
        except BaseException as error:
            failure.append(error)

    # Ray Train's fit() blocks; the main thread follows the run's logs meanwhile.
    thread = threading.Thread(target=work, name="raypipe-fit", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.5)
            watch()
    finally:
        held.give_back()
    events = read_rows(directory / EVENTS)
    begun = max(i for i, e in enumerate(events) if e["event"] == "run")
    goes_on = f"see {directory / EVENTS}; --resume goes on from its checkpoint"
    for event in reversed(events[begun:]):
        if event["event"] == "error":
            error = SpecError if event["exit_status"] == 2 else RunError
            raise error("", event["message"])
        if event["event"] == "failed" and failure:
            raise RunError("run", event["message"], goes_on)
        if event["event"] == "restarted" and failure:
            break
    if failure:
        from ray.train import WorkerGroupError

        # Of the last attempt nothing is known: its process was killed.
        died = isinstance(failure[0], WorkerGroupError)
        raise RunError("run", DRIVER_DIED if died else describe(failure[0]), goes_on)
    p = prepared.plan.parallel
    plan = {"schedule": p.schedule, "stages": p.stages, "replicas": p.replicas, "microbatch": p.microbatch}
    made_for = prepared.plan.made_for
    promised = (prepared.plan.predicted_step_s, made_for.device if made_for is not None else None)
    return _outcome(results[0], prepared), summarise(directory, plan, *promised, prepared.units)


def _outcome(result: Result, prepared: Prepared) -> Result:
    """Ray Train's result, whose checkpoint is the last one it was told of; the best one where the job wants that."""
    from ray.train import Checkpoint

    from raypipe.checkpoint import best

    held = best(prepared.directory / CHECKPOINTS) if prepared.job.train.load_best_at_end else None
    return result if held is None else replace(result, checkpoint=Checkpoint.from_directory(str(held.path)))
