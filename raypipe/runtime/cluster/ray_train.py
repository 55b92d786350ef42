"""Run the driver under Ray Train, which provides a page in the dashboard, restarts and checkpoint retention.

The driver loop is the single worker of a Ray Train run. Ray ends an actor when the process that created it dies, so
the devices are held by the process that starts the run: they survive the death of the driver and of the controller.
Workers write their shards into the run directory themselves; the driver only tells Ray Train where they are.
"""

from __future__ import annotations

import fcntl
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ray.exceptions import RayActorError

from raypipe.checkpoint import Storage, latest, open_checkpoint
from raypipe.cost.hosts import devices_on_hosts
from raypipe.cost.profile import load_profile
from raypipe.errors import RunError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import NO_LOCKS, PROFILE
from raypipe.observe.run_log import EVENTS, RunLog, read_rows, rewind
from raypipe.observe.timelines import save_timelines
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.plan.predict.on_hosts import on_hosts
from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.cluster.failure import failure_message, is_final, keep_traceback, own_error, root_cause
from raypipe.runtime.cluster.rank_order import kinds_on_hosts
from raypipe.runtime.cluster.reserve import Reservation
from raypipe.runtime.cluster.worker_group import WorkerGroup, start_worker_group
from raypipe.runtime.communicators import own_address
from raypipe.runtime.driver import Driver

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.torch import TorchTrainer

POLL_S = "0.2"
"""Interval at which Ray Train's controller polls its worker. A report takes that long; Ray's default is 2 s."""


DRIVER_DIED = "the driver's process died"
ATTEMPTED = ".attempted"
"""File that a run's first attempt creates, and that every attempt locks while it runs."""
LAST_ATTEMPT_S = 60.0
"""How long to wait for the previous attempt's driver to end once its controller is gone."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the command line hands to the run."""

    job: JobSpec
    directory: Path
    resume: bool
    devices: DeviceRequest
    """The resources that each worker reserves."""
    reservation: Reservation
    """The devices, reserved for all attempts."""


DRIVER_BYTES = 512 << 20
"""Memory that the driver reserves."""


class _Reporter:
    """Copies checkpoints to their storage and reports them to Ray Train, from a thread, because both take time.

    A report blocks until the controller's next poll. Ray Train deletes a checkpoint only after a later one has been
    reported, so one that is being copied stays.
    """

    def __init__(self, storage: Storage | None, keep: int) -> None:
        self._storage, self._keep = storage, keep
        self._queue: queue.SimpleQueue[tuple[Path, dict[str, Any]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="raypipe-report", daemon=True)
        self._thread.start()

    def saved(self, step: int, path: Path, metrics: dict[str, Any]) -> None:
        """Queue one checkpoint; raise the error of an earlier one that could not be copied or reported."""
        if self._error is not None:
            raise self._error
        self._queue.put((path, metrics))

    def _work(self) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        try:
            while (item := self._queue.get()) is not None:
                path, metrics = item
                if self._storage is not None:
                    self._storage.put(path, self._keep)
                ray.train.report(
                    metrics,
                    checkpoint=Checkpoint.from_directory(str(path)),
                    checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
                )
        except BaseException as error:
            self._error = error

    def close(self) -> None:
        """Wait until everything is copied and reported; raise the error of what failed."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error


def driver_loop(config: dict[str, Any]) -> None:
    """Run one attempt; Ray Train calls this in its worker, at first and after every failure."""
    request: RunRequest = config["request"]
    job, directory = request.job, request.directory
    with _only_attempt(directory) as restarted:
        # A restart continues from the newest checkpoint; a first attempt does so only when asked to resume.
        checkpoint, notices = latest(directory / "checkpoints") if request.resume or restarted else (None, [])
        done = open_checkpoint(checkpoint, verify=False).step if checkpoint is not None else 0
        lost = rewind(directory, done)
        log = RunLog(directory)
        for notice in notices:
            log.event("notice", message=notice)
        if restarted:
            if not failure_logged(directory):
                log.event("failed", message=DRIVER_DIED)
            request.reservation.end_attempts()
            where = str(checkpoint) if checkpoint else None
            log.event("restarted", checkpoint=where, step=done, steps_repeated=lost)
        uri = job.train.checkpoint_storage
        reporter = _Reporter(None if uri is None else Storage(uri), job.train.keep_checkpoints)
        try:
            # Read the saved plan: an earlier attempt may have found a better order.
            plan = load_plan(directory / "plan.json")
            parallel = plan.parallel
            workers = start_worker_group(
                build_schedule(plan, job.train.batch), parallel.replicas, request.devices, tensor=parallel.tensor,
                timeout_s=job.train.wait_for_devices_s, reservation=request.reservation,
                notify=lambda text: log.event("waiting", message=text),
            )  # fmt: skip
            try:
                plan = _on_these_hosts(plan, request, workers, log)
                driver = Driver(job, plan, directory, log, reporter.saved)
                driver.run(workers, checkpoint, done)
            except Exception as error:
                # Look for the cause before the workers are stopped, while they can still report their errors.
                raise root_cause(error, workers.calls) from None
            finally:
                workers.stop()
            prediction = driver.clock.prediction
            save_timelines(directory, prediction.timeline if prediction else None, driver.clock.measured())
            log.event("finished", counts=driver.counts, memory_bytes=driver.memory_bytes)
        except Exception as error:
            cause = own_error(error)
            path = keep_traceback(directory, cause)
            if is_final(cause):  # return instead of raising: a restart would fail again
                log.event("error", message=failure_message(cause, path), exit_status=getattr(cause, "exit_status", 1))
            else:
                log.event("failed", message=failure_message(cause, path))
                raise
        finally:
            reporter.close()
            log.close()


def _on_these_hosts(plan: Plan, request: RunRequest, workers: WorkerGroup, log: RunLog) -> Plan:
    """Return the plan with its prediction for the hosts on which its workers are; what changes is logged and kept.

    Raises:
        ClusterError: a tensor-parallel group is on several hosts.
    """
    job, directory = request.job, request.directory
    known = request.reservation.kinds
    nodes = known.in_planners_order([at.peer.node for at in workers.locations], plan.parallel.tensor)
    came = devices_on_hosts(nodes)
    kinds = kinds_on_hosts(nodes, came)
    profile = load_profile(directory / PROFILE) if (directory / PROFILE).is_file() else None
    found = on_hosts(plan, job, came, profile, kinds)
    if found is None:
        return plan
    log.event("notice", message=found.message, hosts=came, predicted_step_s=found.plan.predicted_step_s)
    found.plan.save(directory / "plan.json")
    return found.plan


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


def failures(directory: Path) -> int:
    """Count the failures since the run was last started."""
    kinds = [e["event"] for e in read_rows(directory / EVENTS)]
    begun = max((i for i, kind in enumerate(kinds) if kind == "run"), default=0)
    return kinds[begun:].count("failed")


def this_node() -> dict[str, float]:
    """Return a resource request that only this node satisfies; the driver must run where the run's directory is."""
    import ray

    name = f"node:{own_address()}"
    return {name: 0.001} if name in ray.cluster_resources() else {}


def start_run(request: RunRequest) -> Result:
    """Run a job to its end through Ray Train; Ray must be initialised.

    Ray Train restarts the driver after a failure. If Ray Train's controller dies, it is started again here.

    Raises:
        ray.train.TrainingFailedError: the run failed more often than ``train.max_failures`` allows.
        RunError: the same, where the last failure was the controller's death.
    """
    allowed = request.job.train.max_failures
    (request.directory / ATTEMPTED).unlink(missing_ok=True)
    restarts = allowed
    while True:
        try:
            return _trainer(request, restarts).fit()
        except RayActorError as error:
            message = "Ray Train's controller died"
            log = RunLog(request.directory)
            log.event("failed", message=message)
            log.close()
            restarts = allowed - failures(request.directory)
            if restarts < 0:
                raise RunError("run", message, "continue from its newest checkpoint with --resume") from error


def _trainer(request: RunRequest, restarts: int) -> TorchTrainer:
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # else the dashboard's Train page stays empty
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        driver_loop,
        train_loop_config={"request": request},
        # The driver computes nothing, so it reserves no CPU: all of them belong to the workers.
        scaling_config=ScalingConfig(
            num_workers=1, resources_per_worker={"CPU": 0, "memory": DRIVER_BYTES, **this_node()}
        ),
        run_config=RunConfig(
            name=request.directory.name,
            storage_path=str(request.directory.parent),
            failure_config=FailureConfig(max_failures=restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=request.job.train.keep_checkpoints),
        ),
    )
