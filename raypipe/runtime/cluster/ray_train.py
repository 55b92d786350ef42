"""Ray Train around the driver: the run's page in the dashboard, restarts after failures, checkpoint retention.

The driver loop is the single worker of a Ray Train run. The process that starts the run holds the devices: neither the
driver's death nor the controller's loses them, and Ray ends an actor when the process that made it dies. Stage actors
write their shards into the run directory themselves; the driver only tells Ray Train where they are.
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

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.errors import RunError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import NO_LOCKS
from raypipe.observe.run_log import EVENTS, RunLog, read_rows, rewind
from raypipe.observe.timelines import save_timelines
from raypipe.plan.plan import load_plan
from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.cluster.failure import is_final, keep_traceback, own_error, root_cause, told
from raypipe.runtime.cluster.reserve import Reservation
from raypipe.runtime.cluster.worker_group import start_worker_group
from raypipe.runtime.communicators import own_address
from raypipe.runtime.driver import Driver

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.torch import TorchTrainer

POLL_S = "0.2"
"""How often Ray Train's controller looks at its worker; its default of 2 s is how long every report would take."""


DRIVER_DIED = "the driver's process died"
ATTEMPTED = ".attempted"
"""Left by a run's first attempt, and locked while one is under way."""
LAST_ATTEMPT_S = 60.0
"""Time that a driver has to end once its controller is gone."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the command line hands to the run."""

    job: JobSpec
    directory: Path
    resume: bool
    devices: DeviceRequest
    held: Reservation
    """The devices, reserved for all attempts."""


DRIVER_BYTES = 512 << 20
"""Memory the driver reserves; it computes nothing, so all CPUs belong to the stage actors."""


class _Reporter:
    """Tells Ray Train of checkpoints from a thread of its own: a report waits for the controller's next poll."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Path, dict[str, Any]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="raypipe-report", daemon=True)
        self._thread.start()

    def saved(self, step: int, path: Path, metrics: dict[str, Any]) -> None:
        """Queue one checkpoint."""
        self._queue.put((path, metrics))

    def _work(self) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode

        try:
            while (item := self._queue.get()) is not None:
                path, metrics = item
                ray.train.report(
                    metrics,
                    checkpoint=Checkpoint.from_directory(str(path)),
                    checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
                )
        except BaseException as error:
            self._error = error

    def close(self) -> None:
        """Wait until everything is reported; raises what a report raised."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error


def driver_loop(config: dict[str, Any]) -> None:
    """What Ray Train's worker runs; again after every failure."""
    request: RunRequest = config["request"]
    job, directory = request.job, request.directory
    with _alone(directory) as again:
        # A restart goes on from the newest checkpoint; a first attempt does so only when asked to resume.
        checkpoint, notices = latest(directory / "checkpoints") if request.resume or again else (None, [])
        done = open_checkpoint(checkpoint, verify=False).step if checkpoint is not None else 0
        rewind(directory, done)
        log = RunLog(directory)
        for notice in notices:
            log.event("notice", message=notice)
        if again:
            if not failure_told(directory):
                log.event("failed", message=DRIVER_DIED)
            request.held.end_attempts()
            log.event("restarted", checkpoint=str(checkpoint) if checkpoint else None)
        reporter = _Reporter()
        try:
            # As saved: an earlier attempt may have found a better order meanwhile.
            plan = load_plan(directory / "plan.json")
            driver = Driver(job, plan, directory, log, reporter.saved)
            workers = start_worker_group(
                driver.schedule, plan.parallel.replicas, request.devices, tensor=plan.parallel.tensor,
                timeout_s=job.train.wait_for_devices_s, held=request.held,
                tell=lambda text: log.event("waiting", message=text),
            )  # fmt: skip
            try:
                driver.run(workers, checkpoint, done)
            except Exception as error:
                raise root_cause(
                    error, workers.calls
                ) from None  # while the other devices can still say what befell them
            finally:
                workers.stop()
            prediction = driver.clock.prediction
            save_timelines(directory, prediction.timeline if prediction else None, driver.clock.measured())
            log.event("finished", counts=driver.counts, memory_bytes=driver.memory_bytes)
        except Exception as error:
            cause = own_error(error)
            path = keep_traceback(directory, cause)
            if is_final(cause):  # no restart would mend it
                log.event("error", message=told(cause, path), exit_status=getattr(cause, "exit_status", 1))
            else:
                log.event("failed", message=told(cause, path))
                raise
        finally:
            reporter.close()
            log.close()


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Be the only attempt at a run; whether there was one before.

    A driver whose controller was killed may live on for a moment: it must not write beside the next one.
    """
    with (directory / ATTEMPTED).open("a+", encoding="utf-8") as marker:
        deadline = time.monotonic() + LAST_ATTEMPT_S
        while not _locked(marker):
            if time.monotonic() > deadline:
                raise RunError(str(directory), "an earlier attempt at this run does not end", "end its process")
            time.sleep(0.1)
        marker.seek(0)
        again = marker.read() != ""
        marker.write("attempted\n")
        marker.flush()
        yield again


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def failure_told(directory: Path) -> bool:
    """Whether the last attempt at a run left a word of why it failed; a killed process leaves none."""
    marks = [e["event"] for e in read_rows(directory / EVENTS) if e["event"] in ("run", "restarted", "failed")]
    return bool(marks) and marks[-1] == "failed"


def failures(directory: Path) -> int:
    """Failures since the run was last started."""
    kinds = [e["event"] for e in read_rows(directory / EVENTS)]
    begun = max((i for i, kind in enumerate(kinds) if kind == "run"), default=0)
    return kinds[begun:].count("failed")


def this_node() -> dict[str, float]:
    """Resources that only the calling process's node has, and enough of: there the run's directory is."""
    import ray

    name = f"node:{own_address()}"
    return {name: 0.001} if name in ray.cluster_resources() else {}


def start_run(request: RunRequest) -> Result:
    """Run to the end through Ray Train; Ray must be initialised.

    Ray Train restarts the driver after a failure, and is itself started again when its controller dies.

    Raises:
        ray.train.TrainingFailedError: it failed more often than ``train.max_failures`` allows.
        RunError: it did, and the last failure was the controller's death.
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
                raise RunError("run", message, "--resume goes on from its checkpoint") from error


def _trainer(request: RunRequest, restarts: int) -> TorchTrainer:
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # else the dashboard's Train page stays empty
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        driver_loop,
        train_loop_config={"request": request},
        # The driver computes nothing: all CPUs belong to the stage actors.
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
