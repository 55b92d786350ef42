"""Weights and optimizer state of a session by name, in a folder of safetensors that each device writes and reads.

``weights-RANK.safetensors`` has parameters by the model's own names, so that transformers and samplers can read them;
``optimizer-RANK.safetensors`` has, for each, ``NAME::KEY`` of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raypipe.errors import CheckpointError
from raypipe.runtime.update.optimizer import load_master, updated_tensor

WEIGHTS, OPTIMIZER = "weights", "optimizer"
BETWEEN = "::"


def write(folder: Path, rank: int, held: Iterable[tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]]) -> None:
    """Write the parameters of a device's stages, and what their optimizers keep of them."""
    weights: dict[str, Tensor] = {}
    states: dict[str, Tensor] = {}
    for named, optimizer in held:
        for name, parameter in named.items():
            master = updated_tensor(optimizer, parameter)
            weights[name] = master.detach().cpu().contiguous()
            for key, value in optimizer.state.get(master, {}).items():
                states[f"{name}{BETWEEN}{key}"] = value.detach().cpu().contiguous()
    if weights:
        save_file(weights, folder / f"{WEIGHTS}-{rank:05}.safetensors")
        save_file(states, folder / f"{OPTIMIZER}-{rank:05}.safetensors")


def read(
    folder: Path,
    held: Iterable[tuple[Mapping[str, nn.Parameter], torch.optim.Optimizer]],
    with_optimizer: bool,
) -> None:
    """Set the parameters of a device's stages, and their optimizers' state; without it the optimizers begin anew.

    Raises:
        CheckpointError: the folder does not have all parameters, or one has another shape.
    """
    where = {key: (file, key) for file in sorted(folder.glob("*.safetensors")) for key in _keys(file)}

    def get(key: str) -> Tensor:
        file, name = where[key]
        with safe_open(file, framework="pt") as found:
            value: Tensor = found.get_tensor(name)
        return value

    for named, optimizer in held:
        for name, parameter in named.items():
            if name not in where:
                raise CheckpointError(str(folder), f"has no parameter {name}", "load weights of the same model")
            value = get(name)
            if value.shape != parameter.shape:
                why = f"{name} has shape {list(value.shape)}, and in the model {list(parameter.shape)}"
                raise CheckpointError(str(folder), why, "load weights of the same model")
            load_master(optimizer, parameter, value)
            master = updated_tensor(optimizer, parameter)
            optimizer.state.pop(master, None)
            prefix = f"{name}{BETWEEN}"
            keys = [key for key in where if key.startswith(prefix)]
            if with_optimizer and keys:
                state = {key.removeprefix(prefix): get(key) for key in keys}
                optimizer.state[master] = {
                    key: value if key == "step" else value.to(master.device) for key, value in state.items()
                }


def _keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as found:
        return list(found.keys())
