"""The optimizer that the Hugging Face Trainer would make, or that a script makes, as keys of ``train``.

Its parameter groups become ``train.groups``: who a parameter is, is known by identity, and the workers know it by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from raypipe.errors import SpecError
from raypipe.runtime.update.optimizer import OPTIMIZERS
from raypipe.trainer.given_model import without_peft

CLASSES = {kind.made_by: (name, kind.options) for name, kind in OPTIMIZERS.items() if isinstance(kind.made_by, type)}
"""PyTorch's optimizers that ``train.optimizer`` has, each with its name and the keys of ``train`` that it reads."""
EPS = {"adagrad": 1e-10, "rmsprop": 1e-8}
"""PyTorch's default of optimizers for which the Trainer does not pass on ``adam_epsilon``."""
BY_OPTIM_ARGS = {"sgd": ("momentum",), "adagrad": ("eps",), "rmsprop": ("alpha", "eps", "momentum")}
"""Options that ``optim_args`` gives to an optimizer."""
OF_GROUPS = ("lr", "weight_decay")
"""Options that groups may differ in."""
WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")
"""Options that change no value."""


def decays_as_matrices(model: nn.Module, decays: Collection[str]) -> bool:
    """Return whether, of the trained parameters, the matrices alone are named in ``decays``."""
    return all((p.dim() > 1) == (name in decays) for name, p in model.named_parameters() if p.requires_grad)


def start_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group before any scheduler changed it."""
    return float(group.get("initial_lr", group["lr"]))


def reference_group(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of the parameter group whose rates are ``train``'s: the one with the highest."""
    rates = [start_rate(group) for group in optimizer.param_groups]
    return rates.index(max(rates))


def check_optimizer(optimizer: Any, where: str) -> None:
    """Check that workers can make an optimizer like this one.

    Args:
        optimizer: what was made.
        where: names its origin in errors.

    Raises:
        SpecError: it is of another class, has options that are not carried, or it has been used.
    """
    if type(optimizer) not in CLASSES:
        names = ", ".join(f"torch.optim.{kind.__name__}" for kind in CLASSES)
        raise SpecError(where, f"makes {type(optimizer).__name__}, which is not available", f"make one of {names}")
    _, options = CLASSES[type(optimizer)]
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad's begins at 0
        raise SpecError(where, "its optimizer has made steps already, whose state is not carried", "make a new one")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise SpecError(where, "its optimizer has hooks, which no worker has", "remove them")
    usual = type(optimizer)([nn.Parameter(torch.zeros(1))]).defaults
    for key in usual.keys() - set(OF_GROUPS) - set(WAYS_TO_COMPUTE):
        found = [group[key] for group in optimizer.param_groups]
        if key in options:
            if any(value != found[0] for value in found):
                why = f"its groups differ in {key}, and here they may in {' and '.join(OF_GROUPS)} alone"
                raise SpecError(where, why, f"give all of them the same {key}")
        elif any(value != usual[key] for value in found):
            other = next(value for value in found if value != usual[key])
            raise SpecError(where, f"its optimizer has {key}={other}, which is not available", f"leave {key} out")


def optimizer_keys(optimizer: torch.optim.Optimizer, model: nn.Module, where: str) -> dict[str, Any]:
    """Return the keys of ``train`` that say an optimizer, after ``check_optimizer``.

    Parameters that it has not got stay as they are, as there, by a rate of 0.

    Args:
        optimizer: of parameters of the model.
        model: the instance that trains.
        where: names the optimizer's origin in errors.

    Raises:
        SpecError: it has parameters of something else, or its rates are all 0.
    """
    groups = optimizer.param_groups
    base = start_rate(groups[reference_group(optimizer)])
    if not (math.isfinite(base) and base > 0):
        raise SpecError(where, f"its highest learning rate is {base}", "give a finite one above 0")
    named = dict(without_peft(model).named_parameters())
    name_of = {id(p): name for name, p in named.items()}
    left = {name for name, p in named.items() if p.requires_grad}
    held: dict[tuple[float, float], list[str]] = {}
    for group in groups:
        if any(id(p) not in name_of for p in group["params"]):
            fix = "make it of self.model.parameters(), or of those of the model that you give"
            raise SpecError(where, "its optimizer has a parameter that is not the model's", fix)
        some = [name for p in group["params"] if (name := name_of[id(p)]) in left]
        held.setdefault((start_rate(group) / base, float(group["weight_decay"])), []).extend(some)
        left.difference_update(some)
    usual = next(key for key in held if key[0] == 1.0)
    if left:
        held.setdefault((0.0, 0.0), []).extend(sorted(left))
    made = [
        {"parameters": some, "scale": scale, "weight_decay": decay}
        for (scale, decay), some in held.items()
        if some and (scale, decay) != usual
    ]
    name, options = CLASSES[type(optimizer)]
    of_all = {key: groups[0][key] for key in options}
    return {"optimizer": name, **of_all, "lr": base, "weight_decay": usual[1], "decay": "all", "groups": made}


def options(a: Mapping[str, Any], optimizer: str) -> dict[str, Any]:
    """Return the keys of ``train`` that the arguments give to an optimizer, such as ``momentum``.

    Args:
        a: values of the arguments; ``optim_args`` is a text such as ``momentum=0.9``.
        optimizer: ``train.optimizer``.

    Raises:
        SpecError: ``optim_args`` says anything else.
    """
    takes = BY_OPTIM_ARGS.get(optimizer, ())
    usual = {
        "betas": [float(a["adam_beta1"]), float(a["adam_beta2"])],
        "eps": EPS.get(optimizer, float(a["adam_epsilon"])),
        "momentum": 0.0,
        "alpha": 0.99,
    }
    found = {key: usual[key] for key in OPTIMIZERS[optimizer].options}
    for one in str(a["optim_args"] or "").replace(" ", "").split(","):
        key, _, value = one.partition("=")
        if not one:
            continue
        try:
            if key not in takes:
                raise ValueError
            found[key] = float(value)
        except ValueError:
            fix = "give what AdamW has as adam_beta1, adam_beta2, adam_epsilon"
            if takes:
                fix = f"give {' or '.join(f'{name}=NUMBER' for name in takes)} alone"
            raise SpecError("args.optim_args", f"{one} is not available for {a['optim']}", fix) from None
    return found
