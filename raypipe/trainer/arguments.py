"""Translate ``transformers.TrainingArguments``, or a dict of their names, to keys of a job file.

Arguments without a counterpart are refused if they would change the result or need another way to train. Arguments that
do not affect training (such as how often to log) are ignored. All others that are set are named in one warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from raypipe.errors import SpecError, nearest
from raypipe.trainer.optimizers import momentum

READ: dict[str, Any] = {
    "output_dir": "", "max_steps": -1, "num_train_epochs": 3.0, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "warmup_steps": 0, "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear", "optim": "adamw_torch", "seed": 42, "bf16": False, "eval_strategy": "no",
    "eval_steps": None, "logging_steps": 500, "save_strategy": "steps", "save_steps": 500, "save_total_limit": None,
    "activation_checkpointing": None, "gradient_checkpointing": None, "full_determinism": False,
    "load_best_model_at_end": False, "metric_for_best_model": None, "greater_is_better": None, "report_to": "none",
    "logging_strategy": "steps", "logging_first_step": False, "remove_unused_columns": True,
    "per_device_eval_batch_size": 8, "train_sampling_strategy": "random", "group_by_length": False,
    "data_seed": None, "dataloader_drop_last": False, "lr_scheduler_kwargs": None, "optim_args": None,
    "label_smoothing_factor": 0.0,
}  # fmt: skip
"""The arguments that are translated, with transformers' defaults. A dict may contain no others."""
REFUSED = {
    "fp16", "optim_target_modules",
    "neftune_noise_alpha", "auto_find_batch_size",
    "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "label_names", "torch_compile",
    "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cpu",
}  # fmt: skip
"""Arguments that are refused, because without them the run would not be the requested one."""
NO_MATTER = {
    "logging_dir", "log_on_each_node", "logging_nan_inf_filter", "log_level",
    "log_level_replica", "disable_tqdm", "run_name", "project", "average_tokens_across_devices",
    "prediction_loss_only", "eval_do_concat_batches", "eval_accumulation_steps",
    "save_on_each_node", "enable_jit_checkpoint", "skip_memory_metrics", "do_train", "do_eval", "do_predict",
    "local_rank", "use_cache", "accelerator_config", "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs", "overwrite_output_dir",
    "predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config",
}  # fmt: skip
"""Arguments that are ignored, because they do not affect training; likewise ``dataloader_*`` and ``ddp_*``."""
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}


def read_arguments(args: Any) -> dict[str, Any]:
    """Return the values of the arguments in ``READ``.

    ``args`` is a ``TrainingArguments``, any object with such attributes, a dict, or None for the defaults.

    Raises:
        SpecError: a dict contains another name, or an argument in ``REFUSED`` is set.
    """
    if args is None:
        return dict(READ)
    if isinstance(args, Mapping):
        for name in args:
            if name not in READ:
                raise SpecError(f"args.{name}", "is not supported in a dict", nearest(str(name), READ))
        return {**READ, **args}
    if is_dataclass(args):
        _check_others(args)
    return {name: getattr(args, name, default) for name, default in READ.items()}


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
    steps = int(a["max_steps"])
    if steps <= 0:
        steps = max(1, math.ceil(per_epoch * float(a["num_train_epochs"])))
    optimizer = _one_of(OPTIMIZERS, a["optim"], "optim")
    keys = {
        "steps": steps, "batch": batch, "lr": float(a["learning_rate"]), "seed": int(a["seed"]),
        "optimizer": optimizer, "momentum": momentum(a, optimizer), "weight_decay": float(a["weight_decay"]),
        "decay": "matrices",  # as the Trainer does: neither norms nor biases
        "betas": [float(a["adam_beta1"]), float(a["adam_beta2"])], "eps": float(a["adam_epsilon"]),
        "clip": float(a["max_grad_norm"] or 0.0) or None, "dtype": "bfloat16" if a["bf16"] else "float32",
        "label_smoothing": float(a["label_smoothing_factor"] or 0.0),
        "eval_every": every(a, "eval", a["eval_steps"] or a["logging_steps"], steps, per_epoch),
        "checkpoint_every": every(a, "save", a["save_steps"], steps, per_epoch),
        "best_metric": metric, "best_is": "highest" if highest else "lowest",
        "keep_checkpoints": int(a["save_total_limit"] or 0) or None, "deterministic": bool(a["full_determinism"]),
        "load_best_at_end": bool(a["load_best_model_at_end"]), "early_stop": early_stop,
        "report_to": _loggers(a["report_to"]),
    }  # fmt: skip
    if held_out is not None:
        keys["eval_batches"] = math.ceil(held_out / batch)
    return keys


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


def _check_others(args: Any) -> None:
    wanted = [f.name for f in fields(args) if f.init and f.name not in READ and _is_set(args, f)]
    refused = sorted(REFUSED.intersection(wanted))
    if refused:
        where = ", ".join(f"args.{name}" for name in refused)
        raise SpecError(where, f"{'are' if len(refused) > 1 else 'is'} not supported", "leave at the default")
    others = sorted(name for name in set(wanted) - NO_MATTER if not name.startswith(("dataloader_", "ddp_")))
    if others:
        warnings.warn(f"PipelineTrainer ignores args.{', args.'.join(others)}", stacklevel=4)


def _is_set(args: Any, field: Field[Any]) -> bool:
    """Whether an argument differs from its default; None, "none" and "no" count as equal."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    value = getattr(args, field.name)
    if field.name == "use_cpu" and not _gpus():  # without GPUs, training runs on CPUs anyway
        return False
    given, usual = (None if not v or v in ("none", "no", ["none"]) else _text(v) for v in (value, default))
    return given != usual


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


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
    strategy = _text(a[f"{what}_strategy"])
    if strategy not in ("no", "steps", "epoch"):
        raise SpecError(f"args.{what}_strategy", f"{strategy} is not available", "use no, steps or epoch")
    if strategy == "steps":
        return int(given) if given >= 1 else math.ceil(given * steps)
    return epoch if strategy == "epoch" else 0


def _text(value: Any) -> str:
    """Convert a member of transformers' enumerations to its text."""
    return str(getattr(value, "value", value))


def _one_of(table: Mapping[str, str], value: Any, name: str) -> str:
    if _text(value) not in table:
        raise SpecError(f"args.{name}", f"{_text(value)} is not available", nearest(_text(value), table))
    return table[_text(value)]
