"""Run a prepared job: start Ray Train, follow the logs that its driver writes, and return the result."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import RunError, SpecError
from raypipe.launch.elastic import DrainedNodes, Elastic
from raypipe.launch.loggers import Reports
from raypipe.launch.prepared import Prepared
from raypipe.observe.run_dir import CHECKPOINTS, INTERRUPT, ask, go_on, hold
from raypipe.observe.run_log import EVENTS, events_since_start, log_event
from raypipe.observe.run_record import summarise
from raypipe.signals import end_on_signals, ended_by, waiting

if TYPE_CHECKING:
    from ray.train import Result

    from raypipe.runtime.cluster.attempts import RunRequest
    from raypipe.runtime.hosts.devices import DeviceRequest
    from raypipe.runtime.hosts.reserve import Reservation

LOOK_S = 0.5
"""Interval at which the logs of a run are read."""
BETWEEN = {"run", "failed", "restarted", "devices_lost", "paused", "resized"}
"""Events after which a run has no step under way until it has ``started`` again."""


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

    def hold_for(prepared: Prepared, run_id: str | None = None) -> Reservation:
        def waiting(message: str) -> None:
            log_event(prepared.directory, "waiting", message=message)
            watch()

        tensor, train, kinds = prepared.plan.parallel.tensor, prepared.job.train, kinds_of(prepared.plan)
        count, by_node = prepared.schedule.devices * tensor, train.elastic is not None
        return reserve(count, devices, train.wait_for_devices_s, waiting, tensor, kinds, by_node, run_id)

    # Ray chose the devices that were measured, which are any: those of a plan for several kinds are chosen for it.
    fixed = prepared.job.train.elastic is None and prepared.plan.parallel.tensor == 1 and not kinds_of(prepared.plan)
    idle = take_idle(prepared.schedule.devices, devices) if fixed else None
    reservation = hold_for(prepared) if idle is None else idle.reservation
    request = RunRequest(
        prepared.job,
        prepared.directory,
        prepared.resume,
        reservation,
        prepared.validation,
        {} if idle is None else idle.actors,
    )
    with copies_kept(reservation.run_id, prepared.job.train.copy_every):
        if prepared.job.train.elastic is None:
            drained = DrainedNodes(prepared.directory, reservation)
            try:
                return prepared, _ended(request, [drained.look, watch], callbacks)
            finally:
                reservation.give_back()
        with Elastic(prepared, reservation, hold_for) as elastic:
            ended = _ended(request, [elastic.look, watch], callbacks)
            return elastic.prepared, ended


def _ended(
    request: RunRequest, watch: Sequence[Callable[[], None]], callbacks: Sequence[Any]
) -> Result | BaseException:
    """Run Ray Train to the end and return its result or the exception that it raised."""
    from raypipe.runtime.cluster.ray_train import start_run

    ended: list[Result | BaseException] = []

    def work() -> None:
        try:
            ended.append(start_run(request, callbacks))
        except BaseException as error:
            ended.append(error)

    # Ray Train's fit() blocks; the main thread follows the run's logs meanwhile.
    thread = threading.Thread(target=work, name="raypipe-fit", daemon=True)
    thread.start()
    with waiting() as received:
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
