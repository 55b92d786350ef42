"""``PipelineTrainer``: the Python API, shaped like a Hugging Face Trainer.

    import raypipe

    raypipe.init(pp=2)                      # or leave it out: all devices as one pipeline
    trainer = raypipe.PipelineTrainer(model="gpt2", args={"max_steps": 100, "output_dir": "runs/tune"},
                                      train_dataset=rows, eval_dataset=others)
    result = trainer.train()                # ray.train.Result

Datasets are written to the run directory as plain arrays: no code and no pickle travels to the stage actors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from raypipe.errors import SpecError, nearest
from raypipe.job import JobSpec, job_from
from raypipe.train import Prepared, prepare_run, run

if TYPE_CHECKING:
    from ray.train import Result


class Rows(Protocol):
    """A map-style dataset: rows of named tensors, arrays or numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many devices each kind of parallelism takes; ``pp`` None: whatever is left."""

    dp: int = 1
    tp: int = 1
    pp: int | None = None


_degrees = Degrees()


def init(dp: int = 1, tp: int = 1, pp: int | None = None) -> None:
    """Set the degrees of data, tensor and pipeline parallelism for the trainers made from here on.

    Raises:
        SpecError: a degree below 1.
    """
    global _degrees
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise SpecError(f"raypipe.init({name}=)", f"{value} is no number of devices", "give 1 or more")
    _degrees = Degrees(dp, tp, pp)


KNOWN = {
    "output_dir": "", "max_steps": -1, "num_train_epochs": 3.0, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "warmup_steps": 0, "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear", "optim": "adamw_torch", "seed": 42, "bf16": False, "eval_strategy": "no",
    "eval_steps": None, "save_strategy": "steps", "save_steps": 500, "save_total_limit": None,
    "load_best_model_at_end": False, "metric_for_best_model": None,
}  # fmt: skip
"""The arguments that are read, with transformers' defaults; a dict may hold no others, an object may."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}


class PipelineTrainer:
    """Trains a model over the stages of a pipeline; the result does not depend on how many there are.

    ``model``: a transformers model type or local directory, a transformers model (its weights are the start), or what
    a job file has under ``model`` as a dict. ``args``: ``transformers.TrainingArguments``, or a dict of its names; see
    ``KNOWN`` for those that are read. ``train_dataset``, ``eval_dataset``: ``torch.utils.data.Dataset``, Hugging Face
    dataset or list of dicts; every row has the same names and shapes. Without ``eval_dataset`` a tenth is held out.
    The mini-batch is per_device_train_batch_size * gradient_accumulation_steps * dp; the trainer picks micro-batches.
    ``callbacks`` may hold a ``transformers.EarlyStoppingCallback``, and nothing else.
    ``job`` holds further keys of a job file, section by section: ``{"parallel": {"schedule": "zb-h1"}}``.

    Raises:
        SpecError: whatever is wrong with these.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        *,
        callbacks: Sequence[Any] = (),
        job: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        if train_dataset is None:
            raise SpecError("train_dataset", "is missing", "give a dataset of dicts")
        self.arguments = _arguments(args)
        output = self.arguments["output_dir"]
        if not output:
            raise SpecError("args.output_dir", "is missing", "say where the run's files go")
        self.directory = Path(output).expanduser().absolute()
        self.degrees = _degrees
        self._early_stop = _early_stop(callbacks)
        self._model, self._train, self._eval, self._more = model, train_dataset, eval_dataset, job or {}

    def train(self) -> Result:
        """Run to the end; returns Ray Train's result (metrics, newest checkpoint, path).

        Raises:
            SpecError: the model or the data can't be trained like this.
            RunError: the run failed for good.
        """
        prepared = self.prepare()
        result, _ = run(prepared, None, lambda: None)
        return result

    def prepare(self) -> Prepared:
        """Write the data, make the plan, lay out the run directory; what ``train`` does before Ray starts."""
        data = {"type": "arrays", "path": str(self._write(self._train, "train"))}
        if self._eval is not None:
            data["held_out"] = str(self._write(self._eval, "eval"))
        return prepare_run(self._job(data), self.directory, resume=False)

    def _write(self, rows: Rows, name: str) -> Path:
        path = self.directory / "datasets" / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = _columns(rows, f"{name}_dataset")
        with path.open("wb") as out:
            np.savez(out, **columns)  # type: ignore[arg-type]
        return path

    def _job(self, data: dict[str, str]) -> JobSpec:
        a = self.arguments
        metric = a["metric_for_best_model"] or "loss"
        if (a["load_best_model_at_end"] or self._early_stop) and metric not in ("loss", "eval_loss"):
            raise SpecError("args.metric_for_best_model", f"{metric} is not what models are judged by", "use eval_loss")
        samples = len(self._train)
        share = int(a["per_device_train_batch_size"]) * int(a["gradient_accumulation_steps"])
        batch = share * self.degrees.dp
        steps = int(a["max_steps"])
        if steps <= 0:
            steps = max(1, -(-int(samples * float(a["num_train_epochs"])) // batch))
        stages = self._stages()
        train = {
            "steps": steps, "batch": batch, "lr": float(a["learning_rate"]), "seed": int(a["seed"]),
            "optimizer": _one_of(OPTIMIZERS, a["optim"], "optim"), "weight_decay": float(a["weight_decay"]),
            "betas": [float(a["adam_beta1"]), float(a["adam_beta2"])], "eps": float(a["adam_epsilon"]),
            "clip": float(a["max_grad_norm"]) or None, "dtype": "bfloat16" if a["bf16"] else "float32",
            "lr_schedule": _one_of(SCHEDULES, a["lr_scheduler_type"], "lr_scheduler_type"),
            "warmup_steps": _warmup(steps, float(a["warmup_steps"]), float(a["warmup_ratio"] or 0.0)),
            "eval_every": int(a["eval_steps"] or a["save_steps"]) if _text(a["eval_strategy"]) == "steps" else 0,
            "checkpoint_every": int(a["save_steps"]) if _text(a["save_strategy"]) == "steps" else 0,
            "keep_checkpoints": int(a["save_total_limit"] or 2),
            "load_best_at_end": bool(a["load_best_model_at_end"]), "early_stop": self._early_stop,
        }  # fmt: skip
        parallel = {
            "schedule": "1f1b", "stages": stages, "replicas": self.degrees.dp, "tensor": self.degrees.tp,
            "microbatch": microbatch(share, stages),
        }  # fmt: skip
        sections: dict[str, Any] = {"model": self._spec(), "data": data, "train": train, "parallel": parallel}
        for name, keys in self._more.items():
            sections[name] = {**sections.get(name, {}), **keys}
        return job_from({"name": self.directory.name, **sections}, "PipelineTrainer")

    def _stages(self) -> int:
        if self.degrees.pp is not None:
            return self.degrees.pp
        from raypipe.runtime.cluster import connect_all

        return max(1, connect_all() // (self.degrees.dp * self.degrees.tp))

    def _spec(self) -> dict[str, Any]:
        """What a job file would say of the model."""
        model = self._model
        if isinstance(model, str):
            return {"hf": model}
        if isinstance(model, Mapping):
            return dict(model)
        if hasattr(model, "save_pretrained") and hasattr(model, "config"):
            path = self.directory / "model"
            model.save_pretrained(path)
            return {"hf": str(path)}
        raise SpecError(
            "model", f"a {type(model).__name__} can't be built again on every stage",
            'give {"import": "package.module:function"} for a function that builds it',
        )  # fmt: skip


def _early_stop(callbacks: Sequence[Any]) -> dict[str, Any] | None:
    """transformers' callback as a job file says it. There the loss is what stopping goes by as well."""
    found: dict[str, Any] | None = None
    for callback in callbacks:
        if not hasattr(callback, "early_stopping_patience"):
            raise SpecError(
                "callbacks", f"a {type(callback).__name__} is not run here: the driver trains, in another process",
                "leave it out; only an EarlyStoppingCallback is read",
            )  # fmt: skip
        found = {
            "patience": int(callback.early_stopping_patience),
            "min_delta": float(callback.early_stopping_threshold or 0.0),
        }
    return found


def microbatch(share: int, stages: int) -> int:
    """Samples of a micro-batch: the most that divide one pipeline's share of the mini-batch into two per stage.

    >>> microbatch(32, 4), microbatch(12, 2), microbatch(4, 8)
    (4, 3, 1)
    """
    most = max(1, share // (2 * stages))
    return max(size for size in range(1, most + 1) if share % size == 0)


def _warmup(steps: int, given: float, ratio: float) -> int:
    """Steps, or below 1 a share of all of them, as newer transformers have it."""
    return int(given) if given >= 1 else int(steps * (given or ratio))


def _arguments(args: Any) -> dict[str, Any]:
    if isinstance(args, Mapping):
        for name in args:
            if name not in KNOWN:
                raise SpecError(f"args.{name}", "is not read here", nearest(str(name), KNOWN))
        return {**KNOWN, **args}
    return {name: getattr(args, name, default) for name, default in KNOWN.items()}


def _text(value: Any) -> str:
    """transformers' enumerations as the words they stand for."""
    return str(getattr(value, "value", value))


def _one_of(table: Mapping[str, str], value: Any, name: str) -> str:
    if _text(value) not in table:
        raise SpecError(f"args.{name}", f"{_text(value)} is not available", nearest(_text(value), table))
    return table[_text(value)]


def _columns(rows: Rows, where: str) -> dict[str, npt.NDArray[Any]]:
    """The rows of a dataset as one array per name."""
    found: dict[str, list[npt.NDArray[Any]]] = {}
    for index in range(len(rows)):
        row = rows[index]
        if not isinstance(row, Mapping):
            raise SpecError(where, f"row {index} is a {type(row).__name__}", "give dicts of the model's arguments")
        if index and set(row) != set(found):
            raise SpecError(where, f"row {index} holds {', '.join(map(str, row))}", "give every row the same names")
        for name, value in row.items():
            array = np.asarray(value)
            column = found.setdefault(str(name), [])
            if array.dtype.kind not in "buif":
                raise SpecError(where, f"{name} of row {index} is no number or tensor", "leave it out, or tokenize it")
            if column and array.shape != column[0].shape:
                why = f"{name} of row {index} has shape {array.shape}, that of row 0 {column[0].shape}"
                raise SpecError(where, why, "pad all rows to one length, with labels of -100")
            column.append(array)
    return {name: np.stack(column) for name, column in found.items()}
