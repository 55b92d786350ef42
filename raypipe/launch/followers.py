"""Follow a run beside it, in the caller's process, by its logs: callbacks of the Python API, and loggers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raypipe.errors import RunError, SpecError, install
from raypipe.files import write_whole
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import STOP, ask
from raypipe.observe.run_log import EVENTS, METRICS, Follower, log_event


class Callback:
    """Follows a run; override what is needed.

    The methods are called in the process that called ``train``, within about half a second and while training goes on:
    steps and validations in their order, checkpoints after the steps that were logged with them. A step that a restart
    repeats is told again.
    """

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is done; ``metrics`` is its row of metrics.jsonl: ``loss``, ``grad_norm``, ``lr``, ``step_s``, ..."""

    def on_evaluate(self, step: int, metrics: dict[str, Any]) -> None:
        """A validation is done; ``metrics`` has ``val_loss``."""

    def on_save(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""

    def should_stop(self) -> bool:
        """Return whether to end the run; asked after each of the calls above.

        The run ends after the steps that are queued already, with a validation and a checkpoint.
        """
        return False


class Callbacks:
    """The callbacks of one run; call ``update`` from time to time.

    The first error of a callback ends the run in order, with a checkpoint; ``raise_error`` raises it afterwards.
    """

    def __init__(self, callbacks: Sequence[Callback], directory: Path) -> None:
        self._callbacks, self._directory = tuple(callbacks), directory
        self._metrics, self._events = Follower(directory / METRICS), Follower(directory / EVENTS)
        self._error: tuple[str, Exception] | None = None
        self._stopped = False

    def update(self) -> None:
        """Tell the callbacks what the run has logged since the last call."""
        for row in self._metrics.new_rows() if self._callbacks else ():
            self._tell("on_evaluate" if "val_loss" in row else "on_step_end", row["step"], row)
        for event in self._events.new_rows() if self._callbacks else ():
            if event["event"] == "checkpoint":
                self._tell("on_save", event["step"], Path(event["path"]))

    def raise_error(self) -> None:
        """Raise the error of a callback, if there was one.

        Raises:
            RunError: a callback failed; it names the callback and its method.
        """
        if self._error is None:
            return
        name, error = self._error
        fix = f"mend the callback; the run ended with a checkpoint in {self._directory / 'checkpoints'}"
        raise RunError(f"callbacks: {name}", f"raised {type(error).__name__}: {error}", fix) from error

    def _tell(self, method: str, *told: Any) -> None:
        for callback in self._callbacks:
            if self._error is not None:
                return
            name = f"{type(callback).__name__}.{method}"
            try:
                getattr(callback, method)(*told)
                name = f"{type(callback).__name__}.should_stop"
                stop = not self._stopped and callback.should_stop()
            except Exception as error:
                self._error, stop = (name, error), True
            if stop and not self._stopped:
                self._stopped = True
                ask(self._directory, STOP, f"{name} asked for it" if self._error is None else f"{name} failed")


# Hand a run's figures to TensorBoard, MLflow and Weights & Biases while it goes on.
#
# It reads the run's logs in the process that started the run, so no step waits for a logger, and one that fails is left
# out from then on, with a notice: training goes on.


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
    result: dict[str, Any] = {}
    for key, value in tree.items():
        result |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return result


GIB = float(1 << 30)
PERCENT = 100.0
FIGURES: dict[str, tuple[str, float]] = {
    "loss": ("loss", 1.0),
    "val_loss": ("val_loss", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "lr": ("lr", 1.0),
    "tokens_per_s": ("tps", 1.0),
    "step_s": ("time/step(s)", 1.0),
    "mfu": ("mfu(%)", PERCENT),
    "bubble_ratio": ("bubble(%)", PERCENT),
    "data_wait_share": ("data_wait(%)", PERCENT),
    "memory_bytes": ("memory/max_reserved(GiB)", 1.0 / GIB),
}
"""By the key in metrics.jsonl, the name that torchtitan and Hugging Face have for it, and the factor. Other figures of
a validation keep their names."""


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row of metrics.jsonl; those that it does not have are left out.

    >>> figures({"step": 3, "loss": 2.5, "bubble_ratio": 0.25, "mfu": None})
    {'loss': 2.5, 'bubble(%)': 25.0}
    >>> figures({"step": 3, "val_loss": 2.25, "val_accuracy": 0.5})
    {'val_loss': 2.25, 'val_accuracy': 0.5}
    """
    named = {key: FIGURES.get(key, (key, 1.0)) for key in row if key in FIGURES or key.startswith("val_")}
    return {name: row[key] * factor for key, (name, factor) in named.items() if row[key] is not None}


class Reports:
    """The loggers of one run; call ``update`` from time to time, and ``close`` at its end.

    Rows that an earlier run of the directory has logged are not told again.
    """

    def __init__(self, job: JobSpec, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._left: dict[str, None] = dict.fromkeys(job.train.report_to)
        self._open: dict[str, Logger] = {}
        self._rows = Follower(directory / METRICS)
        if self._left:
            list(self._rows.new_rows())

    def update(self) -> None:
        """Tell the loggers what the run has logged since the last call."""
        for row in self._rows.new_rows() if self._left else ():
            for name in list(self._left):
                self._try(name, self._log, name, row)

    def close(self) -> None:
        """Tell them the rest, and close them."""
        self.update()
        for name, logger in self._open.items():
            if name in self._left:
                self._try(name, logger.close)

    def _log(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._open:
            self._open[name] = LOGGERS[name].make(self._job, self._directory, row["step"])
        self._open[name].log(row["step"], figures(row))

    def _try(self, name: str, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # a library that reports to others must not end training
            del self._left[name]
            why = (str(error).splitlines() or [""])[0]
            message = f"{name} gets no more figures of this run: {type(error).__name__}: {why}"
            log_event(self._directory, "notice", message=message)
