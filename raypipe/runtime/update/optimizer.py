"""The optimizer of a stage and the learning rate of a step. Both follow from the job alone, not from the plan."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.update.master_weights import master_groups, round_after_step

MARKED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of torch's optimizers that ``torch.compile`` is not to trace."""


def make_optimizer(
    train: TrainSpec, parameters: Iterable[nn.Parameter], dims: Callable[[nn.Parameter], int] = nn.Parameter.dim
) -> torch.optim.Optimizer:
    """Make ``train.optimizer`` over the parameters of one stage. Its fused kernels exist on CPU and CUDA alike.

    What decays follows from a parameter's number of dimensions, which tensor parallelism and tying do not change;
    ``dims`` says it where an optimizer updates flat pieces of parameters. Where the parameters are bfloat16, the
    optimizer updates float32 master weights (``master_weights``).
    """
    every = list(parameters)
    decaying = [p for p in every if train.decay == "all" or dims(p) > 1]
    held: list[dict[str, Any]] = [{"params": decaying}]  # a group may be empty, where a stage is frozen
    if len(decaying) < len(every):
        held.append({"params": [p for p in every if dims(p) <= 1], "weight_decay": 0.0})
    if train.dtype != "bfloat16-true":
        return _optimizer(train, held)
    made = _optimizer(train, master_groups(held))
    round_after_step(made)
    return made


def _optimizer(train: TrainSpec, held: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if train.optimizer == "sgd":
        sgd: type[torch.optim.SGD] = untraced(torch.optim.SGD)
        return sgd(held, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay, fused=True)
    kind: type[torch.optim.Adam] = untraced(torch.optim.AdamW if train.optimizer == "adamw" else torch.optim.Adam)
    return kind(held, lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, fused=True)


@cache
def untraced(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a subclass of an optimizer without the marks that keep ``torch.compile`` out; its updates are the same.

    To set them, the first call of a method imports the tracer (``torch._dynamo`` with SymPy): 1.9 s of processor time
    in every worker, where nothing is traced.
    """
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in MARKED}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))  # what marks ``step`` turns gradients off, too
    return type(kind.__name__, (kind,), methods)


def learning_rate(train: TrainSpec, step: int) -> float:
    """Return the learning rate of ``step``, which counts from 0.

    A linear warm-up comes first, then a constant rate or a cosine or linear decay to ``min_lr``, unless a table says
    all rates; steps beyond its end, of profiling, have its last one.
    """
    if train.lr_table is not None:
        return train.lr_table[min(step, len(train.lr_table) - 1)]
    if step < train.warmup_steps:
        return train.lr * (step if train.warmup_from_zero else step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if train.lr_schedule == "cosine" else 1 - min(1.0, done)
    return train.min_lr + (train.lr - train.min_lr) * share
