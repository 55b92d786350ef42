"""A stage's parameters and optimizer state under plan-independent names, for checkpoints that any plan can read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypipe.checkpoint import Checkpoint
from raypipe.errors import CheckpointError
from raypipe.runtime.gradients import StageKey, TiedHolders
from raypipe.runtime.stage import StageModule

PREVIOUS = "previous"
"""State key of the weights before the last update, which PipeDream-2BW still trains on."""


def owned_keys(
    rank: int, modules: Mapping[StageKey, StageModule], placement: tuple[tuple[int, ...], ...]
) -> list[StageKey]:
    """The stage replicas that this device saves: those of which it is the first holder."""
    return [
        (stage, replica)
        for stage, replica in sorted(modules)
        if (rank, replica) == min((held[stage], r) for r, held in enumerate(placement))
    ]


def _canonical(name: str, tied: tuple[TiedHolders, ...]) -> str:
    for tie in tied:
        if name in tie.members:
            return tie.name
    return name


def state_tensors(
    module: StageModule, optimizer: torch.optim.Optimizer, tied: tuple[TiedHolders, ...]
) -> dict[str, Tensor]:
    """``param/<name>`` and ``optim/<name>/<key>`` of one stage; a tied parameter under its group's name only."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named.items():
        if _canonical(name, tied) != name:
            continue  # another stage, holding the first member, saves it
        found[f"param/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optim/{name}/{key}"] = value
    return found


def read_state(
    checkpoint: Checkpoint, module: StageModule, optimizer: torch.optim.Optimizer, tied: tuple[TiedHolders, ...]
) -> None:
    """Load one stage's parameters and optimizer state, whatever plan wrote them.

    Raises:
        CheckpointError: a parameter is missing or has another shape: the checkpoint is of another model.
    """
    keys = set(checkpoint.keys)
    wanted: dict[str, list[str]] = {}
    for name in module.named:
        base = _canonical(name, tied)
        prefix = f"optim/{base}/"
        states = sorted(k for k in keys if k.startswith(prefix) and not k.endswith(f"/{PREVIOUS}"))
        wanted[name] = [f"param/{base}", *states]
    tensors = checkpoint.read({k for ks in wanted.values() for k in ks})
    for name, parameter in module.named.items():
        param_key, *optim_keys = wanted[name]
        saved = tensors[param_key]
        if saved.shape != parameter.shape:
            raise CheckpointError(
                str(checkpoint.path),
                f"{param_key} has shape {tuple(saved.shape)}, the model's has {tuple(parameter.shape)}",
                "resume with the job that wrote it",
            )
        with torch.no_grad():
            parameter.copy_(saved)
        if optim_keys:
            optimizer.state[parameter] = {
                k.rsplit("/", 1)[1]: tensors[k].clone().to(parameter.device) for k in optim_keys
            }


def previous_tensors(
    module: StageModule, previous: Mapping[str, Tensor], tied: tuple[TiedHolders, ...]
) -> dict[str, Tensor]:
    """The version before the newest, ``optim/<name>/previous``; ``previous`` is by parameter path in the module."""
    names = {id(p): name for name, p in module.named.items()}
    found = {}
    for path, parameter in module.named_parameters():
        name = names[id(parameter)]
        if path in previous and _canonical(name, tied) == name:
            found[f"optim/{name}/{PREVIOUS}"] = previous[path].detach()
    return found


def read_previous(checkpoint: Checkpoint, module: StageModule, tied: tuple[TiedHolders, ...]) -> dict[str, Tensor]:
    """What ``previous_tensors`` wrote, by parameter path; empty where the checkpoint has none."""
    names = {id(p): name for name, p in module.named.items()}
    keys = {path: f"optim/{_canonical(names[id(p)], tied)}/{PREVIOUS}" for path, p in module.named_parameters()}
    if not set(keys.values()) <= set(checkpoint.keys):
        return {}
    tensors = checkpoint.read(set(keys.values()))
    return {path: tensors[key].to(module.get_parameter(path).device) for path, key in keys.items()}
