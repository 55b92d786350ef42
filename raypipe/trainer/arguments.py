"""Translate ``transformers.TrainingArguments``, or a dict of their names, to keys of a job file.

What becomes of each argument is its row in ``library/arguments.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from raypipe.errors import SpecError, nearest
from raypipe.trainer.library import check_fields, defaults, text
from raypipe.trainer.optimization import options

OPTIMIZERS = {
    "adafactor": "adafactor",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
}


def read_arguments(args: Any) -> dict[str, Any]:
    """Return the values of the arguments that are translated to a job.

    ``args`` is a ``TrainingArguments``, any object with such attributes, a dict, or None for the defaults.

    Raises:
        SpecError: a dict contains another name, or an argument is set that is refused or not known.
    """
    read = defaults()
    if args is None:
        return read
    if isinstance(args, Mapping):
        for name in args:
            if name not in read:
                raise SpecError(f"args.{name}", "is not supported in a dict", nearest(str(name), read))
        return {**read, **args}
    if is_dataclass(args):
        check_fields(args)
    return {name: getattr(args, name, default) for name, default in read.items()}


def train_keys(
    a: Mapping[str, Any], per_epoch: int, held_out: int | None, replicas: int, early_stop: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the ``train`` section of a job, but for its schedule of learning rates (``rates.rate_keys``).

    The mini-batch is per_device_train_batch_size * gradient_accumulation_steps * replicas.

    Args:
        a: values of the arguments, from ``read_arguments``.
        per_epoch: steps of an epoch.
        held_out: rows of the evaluation dataset, if there is one.
        replicas: data-parallel copies.
        early_stop: value of ``train.early_stop``.

    Raises:
        SpecError: raypipe does not have the optimizer or strategy.
    """
    metric = (a["metric_for_best_model"] or "loss").removeprefix("eval_")
    highest = a["greater_is_better"]
    if highest is None:  # as the Trainer decides it
        highest = not metric.endswith("loss")
    batch = int(a["per_device_train_batch_size"]) * int(a["gradient_accumulation_steps"]) * replicas
    steps = run_steps(a, per_epoch)
    optimizer = _one_of(OPTIMIZERS, a["optim"], "optim")
    keys = {
        "steps": steps,
        "batch": batch,
        "lr": float(a["learning_rate"]),
        "seed": int(a["seed"]),
        "optimizer": optimizer,
        **options(a, optimizer),
        "weight_decay": float(a["weight_decay"]),
        "decay": "matrices",  # as the Trainer does: neither norms nor biases
        "clip": float(a["max_grad_norm"] or 0.0) or None,
        "dtype": "bfloat16" if a["bf16"] else "float32",
        "label_smoothing": float(a["label_smoothing_factor"] or 0.0),
        "eval_every": every(a, "eval", a["eval_steps"] or a["logging_steps"], steps, per_epoch),
        "checkpoint_every": every(a, "save", a["save_steps"], steps, per_epoch),
        "best_metric": metric,
        "best_is": "highest" if highest else "lowest",
        "keep_checkpoints": int(a["save_total_limit"] or 0) or None,
        "deterministic": bool(a["full_determinism"]),
        "load_best_at_end": bool(a["load_best_model_at_end"]),
        "early_stop": early_stop,
        "report_to": _loggers(a["report_to"]),
    }
    if a["tf32"] is not None:
        keys["tf32"] = bool(a["tf32"])
    if held_out is not None:
        keys["eval_batches"] = math.ceil(held_out / batch)
    return keys


def run_steps(a: Mapping[str, Any], per_epoch: int) -> int:
    """Return the steps of a run whose epochs have ``per_epoch``: ``max_steps``, or those of ``num_train_epochs``."""
    steps = int(a["max_steps"])
    return steps if steps > 0 else max(1, math.ceil(per_epoch * float(a["num_train_epochs"])))


def recomputes(a: Mapping[str, Any]) -> bool:
    """Return whether the arguments ask for activation recomputation."""
    return bool(a["activation_checkpointing"] or a["gradient_checkpointing"])


def _loggers(asked: Any) -> list[str]:
    """Return those of ``args.report_to`` that ``train.report_to`` has; the others are named in a warning."""
    names = [asked] if isinstance(asked, str) else list(asked or ())
    known = ("tensorboard", "mlflow", "wandb")
    others = [name for name in names if name not in (*known, "none")]
    if others:
        warnings.warn(f"PipelineTrainer ignores args.report_to={', '.join(others)}", stacklevel=5)
    return [name for name in known if name in names]


def every(a: Mapping[str, Any], what: str, given: Any, steps: int, epoch: int) -> int:
    """Return the steps between two evaluations, saves or logs, as ``WHAT_strategy`` says; 0 for none.

    Args:
        a: values of the arguments.
        what: ``eval``, ``save`` or ``logging``.
        given: the number for the strategy ``steps``; below 1, a share of all steps.
        steps: of the run.
        epoch: steps of an epoch.

    Raises:
        SpecError: there is no such strategy.
    """
    strategy = text(a[f"{what}_strategy"])
    if strategy not in ("no", "steps", "epoch"):
        raise SpecError(f"args.{what}_strategy", f"{strategy} is not available", "use no, steps or epoch")
    if strategy == "steps":
        return int(given) if given >= 1 else math.ceil(given * steps)
    return epoch if strategy == "epoch" else 0


def _one_of(table: Mapping[str, str], value: Any, name: str) -> str:
    if text(value) not in table:
        raise SpecError(f"args.{name}", f"{text(value)} is not available", nearest(text(value), table))
    return table[text(value)]


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of data, tensor and pipeline parallelism; None if the planner chooses."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None


_degrees = Degrees()


def init(dp: int | None = None, tp: int | None = None, pp: int | None = None) -> None:
    """Set the degrees of data, tensor and pipeline parallelism for trainers created afterwards.

    Without ``pp``, the planner chooses the schedule, stages and micro-batches, and also the replicas unless ``dp`` is
    given. For that, it profiles the model on the available devices for some seconds before training. With ``pp``,
    degrees that are not given are 1. ``tp`` requires ``pp``, because the planner does not choose tensor parallelism.

    Raises:
        SpecError: a degree is below 1, or ``tp`` is given without ``pp``.
    """
    global _degrees
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise SpecError(f"raypipe.init({name}=)", f"{value} is not a number of devices", "give 1 or more")
    if tp is not None and tp > 1 and pp is None:
        raise SpecError("raypipe.init(tp=)", "tensor parallelism needs pp", "add pp=; 1 for no pipeline")
    _degrees = Degrees(dp, tp, pp)


def degrees() -> Degrees:
    """Return what ``init`` has set."""
    return _degrees


def microbatch(share: int, stages: int) -> int:
    """Return the largest micro-batch size that divides ``share`` into at least two micro-batches per stage, else 1.

    >>> microbatch(32, 4), microbatch(12, 2), microbatch(4, 8)
    (4, 3, 1)
    """
    most = max(1, share // (2 * stages))
    return max(size for size in range(1, most + 1) if share % size == 0)
