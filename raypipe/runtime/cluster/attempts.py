"""Run Ray Train's worker, the driver, through the attempts at a run.

A run that loses something goes on by the first of two ways that serves. A worker whose stages have a living copy is
replaced while the others wait (``runtime/in_place.py``). Else the attempt ends, and the driver makes another one from
the newest checkpoint, or from copies in nodes' memory that are newer: on the same devices, where workers that live
serve on beside new ones; with a plan that needs less memory, where that ran out; and in an elastic run, whose devices
the process that started it changes, with another plan for those that are left. Ray Train restarts the driver itself,
where its process died.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from raypipe.checkpoint import Storage, latest, open_checkpoint
from raypipe.cost.hosts import devices_on_hosts
from raypipe.cost.profile import load_profile
from raypipe.errors import DevicesError, RunError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import NO_LOCKS, PROFILE
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, events_since_start, read_rows, rewind
from raypipe.observe.timelines import save_timelines
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.plan.predict.of_plan import on_hosts
from raypipe.runtime.driver import Driver
from raypipe.runtime.executor.metrics import ValidationMetrics, validation_metrics
from raypipe.runtime.hosts.devices import NO_GPUS
from raypipe.runtime.hosts.rank_order import by_number, kinds_of, kinds_on_hosts
from raypipe.runtime.hosts.reserve import Kept, Reservation, reserved_by
from raypipe.runtime.recovery.failure import (
    failure_message,
    is_final,
    keep_traceback,
    own_error,
    plan_with_less,
    ran_out,
    root_cause,
)
from raypipe.runtime.recovery.flight_recorder import places_of, stuck_message
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies, index_of
from raypipe.runtime.saving.saves import RunCheckpoints
from raypipe.runtime.worker.worker_group import (
    WaitingWorkers,
    WorkerGroup,
    start_worker_group,
    those_that_leave,
    titles_of,
    warm_ones,
)

DRIVER_DIED = "the driver's process died"
ATTEMPTED = ".attempted"
"""File that a run's first attempt creates, and that every attempt locks while it runs."""
LAST_ATTEMPT_S = 60.0
"""How long to wait for the previous attempt's driver to end once its controller is gone."""
NODE_S = 3.0
"""How long after a worker's death that of its node may become known."""
LOOK_S = 0.1
"""Interval at which the driver looks for the devices that it goes on with."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to run, from the command line or the Python API."""

    job: JobSpec
    directory: Path
    resume: bool
    reservation: Reservation
    """The devices, reserved for all attempts."""
    validation: ValidationMetrics | None = None
    """Functions of the Python API; those of ``train.metrics`` are imported where they run."""
    waiting: Kept = field(default_factory=dict)
    """Workers that the process which starts the run has on the devices, for the first attempt: they outlive drivers."""


class _Reporter:
    """Copies checkpoints to their storage and reports them to Ray Train, from a thread, because both take time.

    A report blocks until the controller's next poll. Ray Train deletes a checkpoint only after a later one has been
    reported, so one that is being copied stays.
    """

    def __init__(self, storage: Storage | None, keep: int | None) -> None:
        self._storage, self._keep = storage, keep
        self._thread = ThreadPoolExecutor(1, "raypipe-report")
        self._reports: list[Future[None]] = []
        """Those that are under way, or have failed."""

    def saved(self, step: int, path: Path, metrics: dict[str, Any]) -> None:
        """Queue one checkpoint; raise the error of an earlier one that could not be copied or reported."""
        while self._reports and self._reports[0].done():
            self._reports[0].result()
            del self._reports[0]
        self._reports.append(self._thread.submit(self._report, path, metrics))

    def _report(self, path: Path, metrics: dict[str, Any]) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        if self._storage is not None:
            self._storage.put(path, self._keep)
        checkpoint = Checkpoint.from_directory(str(path))
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is copied and reported; raise the error of what failed, unless there is another one."""
        self._thread.shutdown(wait=True)
        if kind is None:
            for report in self._reports:
                report.result()


def driver_loop(request: RunRequest) -> None:
    """Run the attempts of one driver; Ray Train calls this in its worker, at first and where the driver has died."""
    # Here and not by Ray's runtime_env, which the workers would inherit and find no GPU either. They are started by
    # Ray's own processes, so that this process's environment is not theirs.
    os.environ.update(NO_GPUS)
    job, directory = request.job, request.directory
    with _only_attempt(directory) as restarted:
        log = RunLog(directory)
        try:
            uri = job.train.checkpoint_storage
            storage = None if uri is None else Storage(uri)
            with (
                _Reporter(storage, job.train.keep_checkpoints) as reporter,
                NeighbourCopies(job.train.copy_every, log, index_of(request.reservation.run_id)) as copies,
            ):
                _attempts(request, restarted, log, reporter, copies)
        except Exception as error:
            cause = own_error(error)
            message = failure_message(cause, keep_traceback(directory, cause))
            if not is_final(cause):  # between two attempts: Ray Train starts another driver
                log.event("failed", message=message)
                raise
            # Return instead of raising: a restart would fail again.
            log.event("error", message=message, exit_status=getattr(cause, "exit_status", 1))


def _attempts(request: RunRequest, restarted: bool, log: RunLog, reporter: _Reporter, copies: NeighbourCopies) -> None:
    """Run to the end, one attempt after another."""
    directory, train = request.directory, request.job.train
    resumes, reservation = request.resume or restarted, request.reservation
    changes, waiting = devices_changed(directory), WaitingWorkers(dict(request.waiting))
    if restarted:
        serve_on = train.recovery == "in-place"
        devices = changes[-1]["devices"] if changes else reservation.devices
        left = reservation.of_attempts()
        waiting.actors = those_that_leave(waiting.actors, left, devices if serve_on else 0)
        if not failure_logged(directory):
            log.event("failed", message=DRIVER_DIED)
        if _awaits_devices(directory):
            changes = _next_change(directory, changes)
    while True:
        checkpoints = RunCheckpoints(request.job, directory, log, reporter.saved)
        checkpoint, done = _begin(request, resumes, restarted, log, checkpoints, copies)
        try:
            reservation = _newest(request, changes)
            driver = _attempt(request, reservation, checkpoint, done, log, reporter, waiting, copies)
        except Exception as error:
            cause = own_error(error)
            lost = train.elastic is not None and (isinstance(error, DevicesError) or _breaks(reservation))
            if is_final(cause) and not lost:
                waiting.end()
                raise
            message = failure_message(cause, keep_traceback(directory, cause))
            log.event("failed", message=message)
            restarted = resumes = True
            if not lost:
                if not serves_on(directory, cause, reservation):
                    waiting.end()
                if failures(directory) > train.max_failures:
                    waiting.end()
                    log.event("error", message=f"{message}; --resume continues from the last checkpoint", exit_status=1)
                    return
                if ran_out(cause):
                    plan_with_less(request.job, directory, log, cause)
                continue
            log.event("devices_lost", message=message.partition("\n")[0])
        else:
            if driver.interrupted is not None:
                log.event("interrupted", **driver.interrupted)
                return
            if driver.paused is None:
                clock, prediction = driver.clock, driver.clock.prediction
                predicted = prediction.timeline if prediction else None
                save_timelines(directory, predicted, clock.measured(), clock.recorded, driver.norm)
                log.event("finished", counts=driver.counts, memory_bytes=driver.memory_bytes)
                return
            log.event("paused", **driver.paused)  # not before: the devices are given back then
            restarted = False
        waiting.end_beside()  # the next devices may be others
        changes, resumes = _next_change(directory, changes), True


def _begin(
    request: RunRequest,
    resumes: bool,
    restarted: bool,
    log: RunLog,
    checkpoints: RunCheckpoints,
    copies: NeighbourCopies,
) -> tuple[Path | None, int]:
    """Return the newest checkpoint, for an attempt to begin with, and its number of steps; the logs go back to it.

    An attempt after another one may write it of copies that are newer; a first one begins afresh unless it resumes.
    """
    directory = request.directory
    checkpoint, notices = latest(directory / "checkpoints") if resumes else (None, [])
    done = open_checkpoint(checkpoint, verify=False).step if checkpoint is not None else 0
    logged = max((row["step"] for row in read_rows(directory / METRICS) if "loss" in row), default=0)
    from_copies = restarted and copies.restore(checkpoints, done, logged)
    if from_copies:
        done, checkpoint = checkpoints.newest
    lost = rewind(directory, done)
    known = {event.get("message") for event in read_rows(directory / EVENTS)}  # resuming has shown and noted some
    for notice in notices:
        if notice not in known:
            log.event("notice", message=notice)
    if restarted:
        where = str(checkpoint) if checkpoint else None
        source = "neighbour" if from_copies else "checkpoint"
        log.event("restarted", checkpoint=where, step=done, steps_repeated=lost, source=source)
    return checkpoint, done


def _attempt(
    request: RunRequest,
    reservation: Reservation,
    checkpoint: Path | None,
    done: int,
    log: RunLog,
    reporter: _Reporter,
    waiting: WaitingWorkers,
    copies: NeighbourCopies,
) -> Driver:
    """Run on reserved devices until the run ends or pauses, with workers that are ``waiting`` since the attempt before.

    Those of this attempt wait there afterwards.
    """
    job, directory = request.job, request.directory
    # Read the saved plan: an earlier attempt may have found a better order.
    plan = load_plan(directory / "plan.json")
    parallel, elastic = plan.parallel, job.train.elastic
    if elastic is not None:
        waiting.actors.update(warm_ones(reservation))
    workers = start_worker_group(
        titles_of(build_schedule(plan, job.train.batch), parallel.replicas, reservation.together),
        reservation.for_attempt(),
        timeout_s=job.train.wait_for_devices_s if elastic is None else elastic.wait_s,
        notify=lambda text: log.event("waiting", message=text),
        waiting=waiting,
        numbering=plan.numbering(),
    )
    serve_on = False
    try:
        plan = _on_these_hosts(plan, request, reservation, workers, log)
        validation = request.validation or validation_metrics(job.train)
        driver = Driver(job, plan, directory, log, reporter.saved, copies, validation)
        driver.run(workers, checkpoint, done)
        serve_on = driver.paused is not None
    except Exception as error:
        # Look for the cause before the workers are stopped, while they can still report their errors.
        cause = root_cause(error, workers.calls)
        if stuck := stuck_message(places_of(directory, workers.locations, workers.apart)):
            log.event("stuck", message=stuck)
            if not is_final(cause):
                cause.add_note(stuck.partition("\n")[0])
        in_place = job.train.recovery == "in-place" and workers.on_cpus() and not is_final(cause)
        serve_on = elastic is not None or in_place
        raise cause from None
    finally:
        if serve_on:
            workers.leave()
        else:
            workers.stop()
    return driver


def serves_on(directory: Path, cause: BaseException, reservation: Reservation) -> bool:
    """Return whether the workers that a failed attempt has left serve in the next one, beside new ones.

    It is so after a set-up that went well, and where all nodes live. A device without memory begins anew.
    """
    marks = [e["event"] for e in events_since_start(directory) if e["event"] in ("run", "restarted", "started")]
    return marks[-1:] == ["started"] and not ran_out(cause) and not reservation.is_broken()


def _breaks(reservation: Reservation) -> bool:
    """Return whether a node of the reserved devices is gone; a worker's death may be known before its node's."""
    deadline = time.monotonic() + NODE_S
    while not reservation.is_broken():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def devices_changed(directory: Path) -> list[dict[str, Any]]:
    """Return the changes of devices since the run was last started, oldest first."""
    return [e for e in events_since_start(directory) if e["event"] == "resized"]


def failures(directory: Path) -> int:
    """Count the failures since the run was last started."""
    return [e["event"] for e in events_since_start(directory)].count("failed")


def _awaits_devices(directory: Path) -> bool:
    """Return whether an attempt gave up its devices, and there are no others yet."""
    marks = [e["event"] for e in events_since_start(directory) if e["event"] in ("devices_lost", "paused", "resized")]
    return bool(marks) and marks[-1] != "resized"


def _next_change(directory: Path, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Wait until there are other devices; return all changes. This process ends with the one that started the run."""
    while len(result := devices_changed(directory)) == len(known):
        time.sleep(LOOK_S)
    return result


def _newest(request: RunRequest, changes: list[dict[str, Any]]) -> Reservation:
    """The devices to use: those of the newest change."""
    if not changes:
        return request.reservation
    plan, newest = load_plan(request.directory / "plan.json"), changes[-1]
    return reserved_by(
        request.reservation.run_id,
        newest["reservation"],
        newest["devices"],
        request.reservation.request,
        plan.parallel.tensor,
        kinds_of(plan),
    )


def _on_these_hosts(
    plan: Plan, request: RunRequest, reservation: Reservation, workers: WorkerGroup, log: RunLog
) -> Plan:
    """Return the plan with its prediction for the hosts on which its workers are; what changes is logged and kept.

    Raises:
        ClusterError: a tensor-parallel group is on several hosts.
    """
    job, directory = request.job, request.directory
    nodes = by_number([at.peer.node for at in workers.locations], plan.numbering(), plan.parallel.tensor)
    came = devices_on_hosts(nodes)
    kinds = kinds_on_hosts(nodes, came)
    profile = load_profile(directory / PROFILE) if (directory / PROFILE).is_file() else None
    result = on_hosts(plan, job, came, profile, kinds)
    if result is None:
        return plan
    log.event("notice", message=result.message, hosts=came, predicted_step_s=result.plan.predicted_step_s)
    result.plan.save(directory / "plan.json")
    return result.plan


@contextmanager
def _only_attempt(directory: Path) -> Iterator[bool]:
    """Be the only attempt at a run while the block lasts; yield whether there was an attempt before.

    A driver whose controller was killed may live on for a moment, and must not write while the next one does.

    Raises:
        RunError: the previous attempt did not end within ``LAST_ATTEMPT_S``.
    """
    with (directory / ATTEMPTED).open("a+", encoding="utf-8") as marker:
        deadline = time.monotonic() + LAST_ATTEMPT_S
        while not _locked(marker):
            if time.monotonic() > deadline:
                raise RunError(str(directory), "an earlier attempt at this run does not end", "end its process")
            time.sleep(0.1)
        marker.seek(0)
        restarted = marker.read() != ""
        marker.write("attempted\n")
        marker.flush()
        yield restarted


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def failure_logged(directory: Path) -> bool:
    """Return whether the last attempt logged why it failed; a killed process does not."""
    marks = [e["event"] for e in read_rows(directory / EVENTS) if e["event"] in ("run", "restarted", "failed")]
    return bool(marks) and marks[-1] == "failed"
