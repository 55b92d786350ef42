"""TensorBoard, MLflow and Weights & Biases as they are: each gets a run's name, its job and its figures by step."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError, install
from raypipe.job.spec import JobSpec


class Logger(Protocol):
    """Where figures go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of a step."""

    def close(self) -> None:
        """Write what is still held."""


class TensorBoard:
    """Event files in ``RUN_DIR/tensorboard``; figures of steps that a resumed run repeats are replaced."""

    def __init__(self, job: JobSpec, directory: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=first)
        self._writer.add_text("job", f"```\n{job.model_dump_json(indent=1)}\n```", first)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Logger."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See Logger."""
        self._writer.close()


class MLflow:
    """A run of the experiment ``job.name`` at ``MLFLOW_TRACKING_URI``, else in ``RUN_DIR/mlruns``."""

    ID = "mlflow_run_id"

    def __init__(self, job: JobSpec, directory: Path, first: int) -> None:
        named = os.environ.get("MLFLOW_TRACKING_URI")
        if named is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs the whole of MLflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(named or (directory / "mlruns").resolve().as_uri())
        kept = directory / self.ID
        if kept.is_file():
            self._run = kept.read_text(encoding="utf-8")
            self._client.update_run(self._run, "RUNNING")
            return
        known = self._client.get_experiment_by_name(job.name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(job.name)
        self._run = self._client.create_run(experiment, run_name=directory.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in flat(job.model_dump(mode="json")).items()]
        for begin in range(0, len(params), 100):  # MLflow takes no more at once
            self._client.log_batch(self._run, params=params[begin : begin + 100])
        write_whole(kept, self._run.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Logger."""
        from time import time

        # MLflow's names have no parentheses but take "%".
        now = int(time() * 1000)
        metrics = [self._metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """See Logger."""
        self._client.set_terminated(self._run)


def mlflow_name(name: str) -> str:
    """Return a figure's name in the characters that MLflow takes.

    >>> mlflow_name("mfu(%)"), mlflow_name("memory/max_reserved(GiB)")
    ('mfu_percent', 'memory/max_reserved_GiB')
    """
    return name.replace("%", "percent").replace("(", "_").replace(")", "")


class WeightsAndBiases:
    """A run of the project ``job.name`` in ``RUN_DIR/wandb``; offline unless ``WANDB_MODE`` says otherwise."""

    ID = "wandb_run_id"

    def __init__(self, job: JobSpec, directory: Path, first: int) -> None:
        import wandb

        kept = directory / self.ID
        known = kept.read_text(encoding="utf-8") if kept.is_file() else None
        self._run = wandb.init(
            project=job.name,
            name=directory.name,
            dir=str(directory),
            config=job.model_dump(mode="json"),
            id=known,
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
        )
        if known is None:
            write_whole(kept, self._run.id.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See Logger."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See Logger."""
        self._run.finish()


class LoggerKind(NamedTuple):
    """A logger by its name in ``train.report_to``."""

    make: Callable[[JobSpec, Path, int], Logger]
    package: str


LOGGERS: dict[str, LoggerKind] = {
    "tensorboard": LoggerKind(TensorBoard, "tensorboard"),
    "mlflow": LoggerKind(MLflow, "mlflow"),
    "wandb": LoggerKind(WeightsAndBiases, "wandb"),
}


def check_loggers(job: JobSpec) -> None:
    """Check that the packages of a job's loggers are installed.

    Raises:
        SpecError: one is not.
    """
    for name in job.train.report_to:
        if importlib.util.find_spec(LOGGERS[name].package) is None:
            raise SpecError("train.report_to", f"needs {LOGGERS[name].package}, which is not installed", install(name))


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of nested keys by their paths.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found
