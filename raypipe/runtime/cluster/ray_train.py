"""Run the driver under Ray Train, which provides a page in the dashboard, restarts and checkpoint retention.

The driver loop is the single worker of a Ray Train run. Ray ends an actor when the process that created it dies, so
the devices are held by the process that starts the run: they survive the death of the driver and of the controller.
Workers write their shards into the run directory themselves; the driver only tells Ray Train where they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from raypipe.compat.ray_private import validate_snapshot
from raypipe.errors import RunError
from raypipe.files import read_json
from raypipe.observe.run_dir import set_aside
from raypipe.observe.run_log import log_event
from raypipe.runtime.cluster.attempts import ATTEMPTED, RunRequest, driver_loop, failures
from raypipe.runtime.setup.communicators import own_address

if TYPE_CHECKING:
    from ray.train import Result
    from ray.train.torch import TorchTrainer


POLL_S = "0.2"
"""Interval at which Ray Train's controller polls its worker. A report takes that long; Ray's default is 2 s."""
DRIVER_BYTES = 512 << 20
"""Memory that the driver reserves."""


def this_node() -> dict[str, float]:
    """Return a resource request that only this node satisfies; the driver must run where the run's directory is."""
    import ray

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
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoProcessGroup(TorchConfig):  # type: ignore[misc]
        """Starts no process group, which Ray Train would also for one worker: its store listens on every interface."""

        @property
        def backend_cls(self) -> Any:
            return Backend

    return TorchTrainer(
        driver_loop,
        torch_config=NoProcessGroup(),
        train_loop_config={"request": request},
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


# Check Ray Train's snapshot: its list of reported checkpoints, which it reads when a run begins in its directory.
#
# Ray Train needs the list only to delete old checkpoints; a run resumes from raypipe's own manifests. A damaged one is
# therefore renamed, so that Ray Train does not fail on it.

SNAPSHOT = "checkpoint_manager_snapshot.json"


def check_snapshot(directory: Path, say: Callable[[str], None]) -> None:
    """Rename the snapshot if Ray Train could not read it, and report that through ``say``.

    Raises:
        OSError: it cannot be renamed.
    """
    path = directory / SNAPSHOT
    if path.exists() and (wrong := _wrong(path)) is not None:
        say(f"note: {path}: {wrong}; it is now {set_aside(path).name}, and the run resumes from its own checkpoints")


def _wrong(path: Path) -> str | None:
    """Say why Ray Train would reject the snapshot; None if it would accept it."""
    try:
        snapshot = read_json(path)
        validate_snapshot(snapshot)
        listed = [one["checkpoint_dir_name"] for one in snapshot["checkpoint_results"]]
        latest = snapshot.get("latest_checkpoint_result")
        pending = snapshot["pending_training_results"]
        mentioned = [one["checkpoint_dir_name"] for one in (*pending, *([latest] if latest else []))]
        consistent = len(listed) == len(snapshot["checkpoint_report_indices"]) and set(listed).issuperset(mentioned)
        consistent = consistent and len(pending) == len(snapshot["pending_validation_specs"])
    except Exception:  # a damaged file may raise anything here, pydantic's errors included
        return "is damaged"
    if not consistent:
        return "contradicts itself"
    lost = next((name for name in listed if not (path.parent / name).is_dir()), None)
    return None if lost is None else f"names {lost}, which is gone"
