"""Train a job, from the job file to a finished run; used by the command line, Ray jobs and the Python API.

``prepare_run`` checks the request, finds the plan and creates the run directory; ``run`` (or ``execute``) starts Ray
Train and follows it to the end. The parts are in ``raypipe/launch/``.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raypipe.compat.ray_private import without_datasets
from raypipe.errors import RunError, SpecError
from raypipe.files import write_whole
from raypipe.job.rules.no_effect import OUT, UNMASKED
from raypipe.job.spec import JobSpec
from raypipe.launch.elastic import DrainedNodes, Elastic, NamedNodes
from raypipe.launch.followers import Reports, check_loggers
from raypipe.launch.plans import given_plan, kept_plan, make_plan, planned_as_asked, planned_by_measuring, with_plan
from raypipe.launch.prepared import (
    JobModel,
    Planned,
    Prepared,
    check_compiler,
    check_groups,
    check_host_memory,
    check_metrics,
    check_slices,
    units_of,
)
from raypipe.launch.run_directory import check_resume, claim, mend, note, run_directory, saved_job, unusable
from raypipe.observe.run_dir import CHECKPOINTS, INTERRUPT, RECORD, ask, go_on, hold, place, put_aside, stillborn
from raypipe.observe.run_log import EVENTS, events_since_start, log_event
from raypipe.observe.run_record import summarise
from raypipe.plan.joint.better_plans import compile_kernels
from raypipe.plan.shard_ways import check_statistics
from raypipe.signals import end_on_signals, ended_by, ends_without, waiting

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.torch import TorchTrainer

    from raypipe.runtime.cluster.attempts import RunRequest
    from raypipe.runtime.executor.metrics import ValidationMetrics
    from raypipe.runtime.hosts.devices import DeviceRequest
    from raypipe.runtime.hosts.reserve import Reservation

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
    check: Callable[[JobSpec, Path, Say], list[str]] = check_resume,
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
        check: of a run to resume; returns notices of what was found.

    Raises:
        SpecError, ScheduleError: something is wrong with the request.
        CheckpointError: ``train.checkpoint_storage`` cannot be read.
        RunError: a device died while it was profiled.
    """
    check_loggers(job)
    check_compiler(job)
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
        compile_kernels()
    model = JobModel(job) if planned is None else planned.model
    check_metrics(job, model, validation)
    if job.data.mask != type(job.data).model_fields["mask"].default and not model.declared.task.masks:
        raise SpecError("data.mask", UNMASKED, OUT)
    if job.train.groups or job.train.optimizer == "muon":
        check_groups(job.train, model.declared, say)
    shard = (job if planned is None else planned.job).parallel.shard
    check_statistics(shard, shard != "none" and model.declared.batch_statistics)

    where = run_directory(job, directory, resume)
    data = where / "data"
    if empty:
        put_aside(where)
        say(f"{where}: the run in it ended before its first step; starting a new run there")
    if job.train.checkpoint_storage is not None:
        from raypipe.checkpoint import Storage

        Storage(job.train.checkpoint_storage).check()
    notices = check(job, where, say) if resume else []
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

        layers = planned.model.prepared(data)
        for notice in () if resume else layers.notices:
            say(notice)
        check_slices(planned.plan.parallel, layers, data, job, validation)
        units = units_of(layers.task, planned.job, data)
        on_error.pop_all()
    return Prepared(planned.job, layers, planned.plan, planned.schedule, where, resume, job, units, validation)


def _release_measured() -> None:
    """Release the devices that wait for the run since they were measured for it."""
    from raypipe.runtime.hosts.reserve import end_idle

    end_idle()


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
    from raypipe.data import (
        check_placeholders,
        extend_order,
        has_short_steps,
        is_prepared,
        open_data,
        prepare_data,
        token_budget,
    )

    if resume and is_prepared(data):
        extend_order(model.job, model.declared.task, data)
    else:
        prepare_data(model.job, model.declared.task, data)
        check_placeholders(data, model.declared.placeholders)
    budget = token_budget(model.job, 1, model.declared)
    if budget is not None and model.declared.batch_statistics:
        why = "the loss of a document depends on the others of its micro-batch (batch norm, or the model's own loss)"
        raise SpecError("train.tokens_per_step", why, "leave it out, or train with model.loss: task")
    if budget is not None:
        open_data(data, model.declared.task, budget=budget)  # a resumed run's documents may not fit its rows
    if model.declared.batch_statistics and has_short_steps(data):
        why = "a mini-batch is short, and what this model computes of a row depends on the others of its micro-batch"
        fix = "use mini-batches that divide the rows, or dataloader_drop_last (an order without short ones)"
        raise SpecError("data.order", why, fix)


# Run a prepared job: start Ray Train, follow the logs that its driver writes, and return the result.
#
# The driver loop is the single worker of a Ray Train run, which provides a page in the dashboard, restarts and
# checkpoint retention. Ray ends an actor when the process that created it dies, so the devices are held by the process
# that starts the run: they survive the death of the driver and of the controller. Workers write their shards into the
# run directory themselves; the driver only tells Ray Train where they are.


LOOK_S = 0.5
"""Interval at which the logs of a run are read."""
BETWEEN = {"run", "failed", "restarted", "devices_lost", "paused", "resized"}
"""Events after which a run has no step under way until it has ``started`` again."""
POLL_S = "0.2"
"""Interval at which Ray Train's controller polls its worker. A report takes that long; Ray's default is 2 s."""
DRIVER_BYTES = 512 << 20
"""Memory that the driver reserves."""


def execute(prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None]) -> dict[str, Any]:
    """Run to the end and return the summary that CONTRACT.md defines; see ``run`` for errors."""
    return run(prepared, dashboard_port, watch)[1]


@end_on_signals()
def run(
    prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None], callbacks: Sequence[Any] = ()
) -> tuple[Result, dict[str, Any]]:
    """Run to the end and return Ray Train's result and the summary that CONTRACT.md defines.

    Args:
        prepared: the job.
        dashboard_port: port of Ray's dashboard; None for none.
        watch: called twice a second during the run.
        callbacks: Ray Train's, ``ray.train.UserCallback``; its controller calls them.

    Raises:
        SpecError: the cluster can never provide the devices that the plan needs.
        DevicesError: the devices were not free within ``train.wait_for_devices_s``.
        RunError: the run failed and was not restarted; the message is that of the last attempt.
        Terminated, Interrupted: a signal ended it, if it trained, with a checkpoint of its last step.
    """
    with hold(prepared.directory):
        go_on(prepared.directory)  # it asked an earlier run to end
        reports = Reports(prepared.job, prepared.directory)

        def look() -> None:
            watch()
            reports.update()

        try:
            return _run_locked(prepared, dashboard_port, look, callbacks)
        finally:
            reports.close()


def _run_locked(
    prepared: Prepared, dashboard_port: int | None, watch: Callable[[], None], callbacks: Sequence[Any]
) -> tuple[Result, dict[str, Any]]:
    from raypipe.runtime.cluster.connect import connect
    from raypipe.runtime.hosts.devices import cores_of_one_host, warning

    directory = prepared.directory
    together = prepared.plan.parallel.tensor
    count = prepared.schedule.devices * together
    devices = connect(count, dashboard_port, together=together)
    cores = cores_of_one_host(devices)
    log_event(directory, "run", resume=prepared.resume, devices=count, cores=cores)
    if (message := warning(count, cores)) is not None:
        log_event(directory, "notice", message=message)
    if cores is not None and (message := check_host_memory(prepared)) is not None:
        log_event(directory, "notice", message=message)
    prepared, ended = _on_devices(prepared, devices, watch, callbacks)
    result = _result(ended, directory)
    p = prepared.plan.parallel
    plan = {"schedule": p.schedule, "stages": p.stages, "replicas": p.replicas, "microbatch": p.microbatch}
    made_for = prepared.plan.made_for
    promised = (_promised_s(prepared), made_for.device if made_for is not None else None)
    return _outcome(result, prepared), summarise(directory, plan, *promised, prepared.units)


def _on_devices(
    prepared: Prepared, devices: DeviceRequest, watch: Callable[[], None], callbacks: Sequence[Any]
) -> tuple[Prepared, Result | BaseException]:
    """Reserve the devices and run to the end, an elastic run on one set of devices after the other.

    Returns what it ended with, and what Ray Train returned or raised.
    """
    from raypipe.runtime.cluster.attempts import RunRequest
    from raypipe.runtime.hosts.rank_order import kinds_of
    from raypipe.runtime.hosts.reserve import reserve, take_idle
    from raypipe.runtime.saving.neighbour_copies import copies_kept
    from raypipe.runtime.worker.worker_group import start_beside, titles_of

    def hold_for(prepared: Prepared, run_id: str | None = None) -> Reservation:
        def notify(message: str) -> None:
            log_event(prepared.directory, "waiting", message=message)
            watch()

        tensor, train, kinds = prepared.plan.parallel.tensor, prepared.job.train, kinds_of(prepared.plan)
        count, by_node = prepared.schedule.devices * tensor, train.elastic is not None
        return reserve(count, devices, train.wait_for_devices_s, notify, tensor, kinds, by_node, run_id)

    # Ray chose the devices that were measured, which are any: those of a plan for several kinds are chosen for it.
    fixed = prepared.job.train.elastic is None and prepared.plan.parallel.tensor == 1 and not kinds_of(prepared.plan)
    idle = take_idle(prepared.schedule.devices, devices) if fixed else None
    reservation = hold_for(prepared) if idle is None else idle.reservation
    waiting = {} if idle is None else idle.actors
    if not waiting and prepared.job.train.elastic is None and not devices.gpus:
        titles = titles_of(prepared.schedule, prepared.plan.parallel.replicas, reservation.together)
        waiting = start_beside(titles, reservation, prepared.plan.numbering())
    given = (prepared.job, prepared.directory, prepared.resume, reservation, prepared.validation, waiting)
    request = RunRequest(*given)
    named = NamedNodes(prepared.directory)
    with copies_kept(reservation.run_id, prepared.job.train.copy_every):
        if prepared.job.train.elastic is None:
            drained = DrainedNodes(prepared.directory, reservation)
            try:
                return prepared, _ended(request, [named.look, drained.look, watch], callbacks)
            finally:
                reservation.give_back()
        with Elastic(prepared, reservation, hold_for) as elastic:
            ended = _ended(request, [named.look, elastic.look, watch], callbacks)
            return elastic.prepared, ended


def _ended(
    request: RunRequest, watch: Sequence[Callable[[], None]], callbacks: Sequence[Any]
) -> Result | BaseException:
    """Run Ray Train to the end and return its result or the exception that it raised."""
    import ray

    from raypipe.runtime.hosts.reserve import listens

    ended: list[Result | BaseException] = []

    def work() -> None:
        try:
            ended.append(start_run(request, callbacks))
        except BaseException as error:
            ended.append(error)

    # Ray Train's fit() blocks; the main thread follows the run's logs meanwhile.
    thread = threading.Thread(target=work, name="raypipe-fit", daemon=True)
    thread.start()
    address = ray.get_runtime_context().gcs_address

    def last_words(number: int) -> str:
        return f"run: ended by {signal.Signals(number).name}; its Ray is gone\n  fix: continue with --resume"

    with ends_without(partial(listens, address), last_words), waiting() as received:
        asked = False
        while thread.is_alive():
            thread.join(LOOK_S)
            if not asked and (number := received()) is not None:
                if not _trains(request.directory):
                    raise ended_by(number)
                ask(request.directory, INTERRUPT, signal.Signals(number).name)
                asked = True
            for look in watch:
                look()
    number = received()
    if number is not None and not isinstance(ended[0], BaseException):
        raise ended_by(number, _said(request.directory, number))
    return ended[0]


def this_node() -> dict[str, float]:
    """Return a resource request that only this node satisfies; the driver must run where the run's directory is."""
    import ray

    from raypipe.runtime.setup.communicators import own_address

    name = f"node:{own_address()}"
    return {name: 0.001} if name in ray.cluster_resources() else {}


def start_run(request: RunRequest, callbacks: Sequence[Any] = ()) -> Result:
    """Run a job to its end through Ray Train; Ray must be initialised.

    Ray Train restarts the driver after a failure. If Ray Train's controller dies, it is started again here.
    ``callbacks`` are ``ray.train.UserCallback``, which the controller calls.

    Raises:
        ray.train.TrainingFailedError: the run failed more often than ``train.max_failures`` allows.
        RunError: the same, where the last failure was the controller's death.
    """
    from ray.exceptions import RayActorError

    from raypipe.runtime.cluster.attempts import ATTEMPTED, failures

    allowed = request.job.train.max_failures
    (request.directory / ATTEMPTED).unlink(missing_ok=True)
    restarts = allowed
    while True:
        try:
            return _trainer(request, restarts, callbacks).fit()
        except RayActorError as error:
            message = "Ray Train's controller died"
            log_event(request.directory, "failed", message=message)
            restarts = allowed - failures(request.directory)
            if restarts < 0:
                raise RunError("run", message, "continue from its newest checkpoint with --resume") from error


def _trainer(request: RunRequest, restarts: int, callbacks: Sequence[Any]) -> TorchTrainer:
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # else the dashboard's Train page stays empty
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # an actor whose reports nothing here reads
    if not request.directory.name.isascii():  # Ray's metrics cannot have it as a tag, and its controller would fail
        os.environ["RAY_TRAIN_METRICS_ENABLED"] = "0"
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import BackendConfig
    from ray.train.torch import TorchTrainer

    from raypipe.runtime.cluster.attempts import driver_loop

    # Ray Train's controller unpickles all but the function. It then needs neither raypipe nor torch: when one died, all
    # wait until another has started.
    class NoProcessGroup(BackendConfig):  # type: ignore[misc]
        """Starts no process group, which Ray Train would also for one worker: its store listens on every interface."""

        backend = "none"
        """TorchTrainer asks for it."""

    trainer = TorchTrainer(
        partial(driver_loop, request),
        torch_config=NoProcessGroup(),
        # The driver computes nothing, so it reserves no CPU: all of them belong to the workers.
        scaling_config=ScalingConfig(
            num_workers=1, resources_per_worker={"CPU": 0, "memory": DRIVER_BYTES, **this_node()}
        ),
        run_config=RunConfig(
            name=request.directory.name,
            storage_path=str(request.directory.parent),
            failure_config=FailureConfig(max_failures=restarts),
            callbacks=list(callbacks),
            checkpoint_config=CheckpointConfig(num_to_keep=request.job.train.keep_checkpoints),
        ),
    )
    return without_datasets(trainer)


def _trains(directory: Path) -> bool:
    """Return whether a driver runs steps now, and so can save the newest one."""
    marks = [e["event"] for e in events_since_start(directory) if e["event"] in BETWEEN or e["event"] == "started"]
    return bool(marks[-1] == "started")


def _said(directory: Path, number: int) -> str:
    """Say what a signal ended."""
    name = signal.Signals(number).name
    step = next((e["step"] for e in reversed(events_since_start(directory)) if e["event"] == "interrupted"), None)
    at = "after its last step" if step is None else f"after step {step}, with a checkpoint of it"
    return f"ended by {name} {at}"


def _promised_s(prepared: Prepared) -> float | None:
    """Return the plan's predicted step time: for the hosts on which its devices were, if they were not as planned."""
    moved = [e for e in events_since_start(prepared.directory) if e["event"] == "notice" and "hosts" in e]
    return moved[-1].get("predicted_step_s") if moved else prepared.plan.predicted_step_s


def _result(ended: Result | BaseException, directory: Path) -> Result:
    """Return Ray Train's result, or raise the error of a failed run: from its events, else from Ray Train.

    Raises:
        SpecError: the run failed because of a wrong request (exit status 2).
        RunError: the run failed for another reason.
    """
    from raypipe.runtime.cluster.attempts import DRIVER_DIED
    from raypipe.runtime.recovery.failure import describe, keep_traceback

    failed = isinstance(ended, BaseException)
    fix = f"see {directory / EVENTS}; --resume continues from the last checkpoint"
    for event in reversed(events_since_start(directory)):
        if event["event"] == "error":
            error = SpecError if event["exit_status"] == 2 else RunError
            raise error("", event["message"])
        if event["event"] == "failed" and failed:
            raise RunError("run", event["message"], fix)
        if event["event"] == "restarted" and failed:
            break
    if isinstance(ended, BaseException):
        from ray.train import WorkerGroupError

        with suppress(OSError):  # the disk may be full
            keep_traceback(directory, ended)
        # The last attempt's process was killed and left no event.
        died = isinstance(ended, WorkerGroupError)
        raise RunError("run", DRIVER_DIED if died else describe(ended), fix)
    return ended


def _outcome(result: Result, prepared: Prepared) -> Result:
    """Return Ray Train's result with the last reported checkpoint; with ``load_best_at_end``, the best one."""
    from ray.train import Checkpoint

    from raypipe.checkpoint import best

    found = best(prepared.directory / CHECKPOINTS) if prepared.job.train.load_best_at_end else None
    return result if found is None else replace(result, checkpoint=Checkpoint.from_directory(str(found.path)))
