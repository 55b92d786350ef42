"""Several models on one pipeline: what a model does not share with the others changes places between two calls.

A slot is a model's own values of all trained parameters (of all weights, or of the adapters over frozen ones), with the
gradients that have added up and the optimizer's state. Those of one slot are in the stages at a time. Each device
changes them by itself when the next call is for another slot, by pointers, and no device waits for another: calls of
several models follow one another as those of one model do. A model may have a part of the job's adapters: a smaller
rank, fewer layers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from raypipe.errors import CheckpointError
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.optimizer import load_master, updated_tensor
from raypipe.schedule.sharding import StageKey


class _Held(NamedTuple):
    """One parameter of a slot."""

    values: Tensor
    master: Tensor
    """What the optimizer updates: ``values``, or their master weights."""
    gradient: Tensor | None
    state: dict[str, Any] | None
    """The optimizer's; None before the first update."""


class Slots:
    """The slots of one device.

    Args:
        modules: its stage replicas, whose parameters have the values of the slot that runs.
        optimizers: one for each.
        executor: runs them.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, StageModule],
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        executor: Executor,
    ) -> None:
        self._modules, self._optimizers, self._executor = modules, optimizers, executor
        self._away: dict[int, dict[tuple[StageKey, str], _Held]] = {}
        self._here: int | None = None

    def use(self, slot: int) -> None:
        """Run on a slot from now on; a new one begins with the values that are there, and nothing else."""
        if slot == self._here:
            return
        if self._here is not None:
            self._away[self._here] = self._take_out()
        result = self._away.pop(slot, None)
        for key, module in self._modules.items():
            optimizer = self._optimizers[key]
            for name, p in module.trained.items():
                master = updated_tensor(optimizer, p)
                if result is not None:
                    held = result[key, name]
                    master.data, p.data, p.grad = held.master, held.values, held.gradient
                    if held.state is not None:
                        optimizer.state[master] = held.state
                elif self._here is not None:
                    p.data = p.data.clone()
                    if master is not p:
                        master.data = master.data.clone()
        self._executor.casts.drop()
        self._here = slot

    def free(self, slot: int) -> None:
        """Give up what a slot has."""
        if slot == self._here:
            self._take_out()
            self._here = None
        self._away.pop(slot, None)

    def _take_out(self) -> dict[tuple[StageKey, str], _Held]:
        result = {}
        for key, module in self._modules.items():
            optimizer = self._optimizers[key]
            for name, p in module.trained.items():
                master = updated_tensor(optimizer, p)
                result[key, name] = _Held(p.data, master.data, p.grad, optimizer.state.pop(master, None))
            self._executor.sync.drop(key)
        return result


# Weights and optimizer state of a session by name, in a folder of safetensors that each device writes and reads.
#
# ``weights-RANK.safetensors`` has parameters by the model's own names, so that transformers and samplers can read them;
# ``optimizer-RANK.safetensors`` has, for each, ``NAME::KEY`` of the optimizer's state.


WEIGHTS, OPTIMIZER = "weights", "optimizer"
BETWEEN = "::"
DOWN, UP = ".lora_A.", ".lora_B."
"""In peft's names of an adapter's two matrices, ``[rank, inputs]`` and ``[outputs, rank]``."""


class Adapters(NamedTuple):
    """The part of the job's adapters that a slot trains.

    All slots have matrices of the job's rank, for which stages and their kernels are made. The rows of ``lora_A``
    beyond a slot's own rank begin as zeros, and so does all of ``lora_B``, as peft has it. Then both have gradients of
    zero there, whatever the data, and AdamW leaves zeros: the slot is exactly an adapter of its rank, whose scale is
    the job's.
    """

    rank: int
    without: str = ""
    """Pattern of the names of layers whose adapters stay zero, as those of rank 0."""
    seed: int | None = None
    """Draws ``lora_A``; None for the job's start values."""

    def start(self, name: str, value: Tensor) -> Tensor:
        """Return what a parameter starts with, given the job's start value."""
        if DOWN not in name:
            return value
        if self.seed is not None:  # as peft does: Kaiming's uniform bound for a slope of sqrt(5)
            key = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8], "big")
            bound = value.shape[1] ** -0.5
            drawn = torch.empty(value.shape, dtype=torch.float64)
            value = drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(key)).to(value.dtype)
        left_out = bool(self.without) and re.search(self.without, name) is not None
        value = value.clone()
        value[0 if left_out else self.rank :] = 0
        return value


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
    adapters: Adapters | None = None,
) -> None:
    """Set the parameters of a device's stages, and their optimizers' state; without it the optimizers begin anew.

    ``adapters``: to begin with these, where the folder has the job's start values.

    Raises:
        CheckpointError: the folder does not have all parameters, or one has another shape.
    """
    where = {key: (file, key) for file in sorted(folder.glob("*.safetensors")) for key in _keys(file)}

    def get(key: str) -> Tensor:
        file, name = where[key]
        with safe_open(file, framework="pt") as result:
            value: Tensor = result.get_tensor(name)
        return value

    for named, optimizer in held:
        for name, parameter in named.items():
            if name not in where:
                raise CheckpointError(str(folder), f"has no parameter {name}", "load weights of the same model")
            value = get(name)
            if value.shape != parameter.shape:
                why = f"{name} has shape {list(value.shape)}, and in the model {list(parameter.shape)}"
                raise CheckpointError(str(folder), why, "load weights of the same model")
            load_master(optimizer, parameter, value if adapters is None else adapters.start(name, value))
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
    with safe_open(file, framework="pt") as result:
        return list(result.keys())
