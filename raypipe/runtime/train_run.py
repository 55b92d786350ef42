"""Ray Train around the driver: the run's page in the dashboard, restarts after failures, checkpoint retention.

The driver loop is the single worker of a Ray Train run. Stage actors write their shards into the run directory
themselves; the driver only tells Ray Train where they are.
"""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.errors import CheckpointError, DivergenceError, RaypipeError, RequestError, SampleCountError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog, rewind
from raypipe.observe.timelines import save_timelines
from raypipe.plan.plan import load_plan
from raypipe.runtime.devices import DeviceRequest
from raypipe.runtime.driver import Driver
from raypipe.runtime.launch import start_fleet
from raypipe.runtime.links import own_address

if TYPE_CHECKING:
    from ray.train import Result

POLL_S = "0.2"
"""How often Ray Train's controller looks at its worker; its default of 2 s is how long every report would take."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the command line hands to the run."""

    job: JobSpec
    directory: Path
    resume: bool
    devices: DeviceRequest


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
    # A restart goes on from the newest checkpoint; a first attempt does so only when asked to resume.
    marker = request.directory / ".attempted"
    again = marker.exists()
    marker.touch()
    checkpoint, notices = latest(request.directory / "checkpoints") if request.resume or again else (None, [])
    done = open_checkpoint(checkpoint, verify=False).step if checkpoint is not None else 0
    rewind(request.directory, done)
    log = RunLog(request.directory)
    for notice in notices:
        log.event("notice", message=notice)
    if again:
        log.event("restarted", checkpoint=str(checkpoint) if checkpoint else None)
    reporter = _Reporter()
    try:
        # As saved: an earlier attempt may have found a better order meanwhile.
        plan = load_plan(request.directory / "plan.json")
        driver = Driver(request.job, plan, request.directory, log, reporter.saved)
        fleet = start_fleet(driver.schedule, plan.parallel.replicas, request.devices, tensor=plan.parallel.tensor)
        try:
            driver.run(fleet, checkpoint, done)
        finally:
            fleet.stop()
        prediction = driver.clock.prediction
        save_timelines(request.directory, prediction.timeline if prediction else None, driver.clock.measured())
        log.event("finished", counts=driver.counts, memory_bytes=driver.memory_bytes)
    except (RequestError, CheckpointError, DivergenceError, SampleCountError) as error:
        log.event("error", message=describe(error), exit_status=error.exit_status)  # no restart would mend it
    except Exception as error:
        log.event("failed", message=describe(error))
        raise
    finally:
        reporter.close()
        log.close()


def describe(error: BaseException) -> str:
    """The one message of a failure: raypipe's own error where there is one inside Ray's wrapping."""
    inner: BaseException | None = error
    while inner is not None:
        # Ray's wrapping is an instance of the cause's class too, but says it with a traceback.
        deeper = getattr(inner, "cause", None) or inner.__cause__
        if isinstance(inner, RaypipeError) and not isinstance(deeper, RaypipeError):
            return str(inner)
        inner = deeper
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def this_node() -> dict[str, float]:
    """Resources that only the calling process's node has, and enough of: there the run's directory is."""
    import ray

    name = f"node:{own_address()}"
    return {name: 0.001} if name in ray.cluster_resources() else {}


def start_run(request: RunRequest) -> Result:
    """Run to the end through Ray Train; Ray must be initialised.

    Raises:
        ray.train.TrainingFailedError: it failed more often than ``train.max_failures`` allows.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # else the dashboard's Train page stays empty
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    (request.directory / ".attempted").unlink(missing_ok=True)
    trainer = TorchTrainer(
        driver_loop,
        train_loop_config={"request": request},
        # The driver computes nothing: all CPUs belong to the stage actors.
        scaling_config=ScalingConfig(
            num_workers=1, resources_per_worker={"CPU": 0, "memory": DRIVER_BYTES, **this_node()}
        ),
        run_config=RunConfig(
            name=request.directory.name,
            storage_path=str(request.directory.parent),
            failure_config=FailureConfig(max_failures=request.job.train.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=request.job.train.keep_checkpoints),
        ),
    )
    return trainer.fit()
