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
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raypipe.errors import CheckpointError, SpecError
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import StageKey
from raypipe.runtime.update.optimizer import load_master, updated_tensor


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


LAYERS: Final = {
    "train_attn": "attn|attention",
    "train_mlp": "mlp|feed_forward|ffn|experts",
    "train_unembed": "lm_head|embed_out",
}
"""Patterns of the names of the layers that a client can leave out."""


def adapters_of(asked: Any, rank: int, start: Path) -> Adapters:
    """Return the adapters of a new model.

    Args:
        asked: the request's ``lora_config``; None for a model without adapters.
        rank: of the job's adapters; 0 where all weights are trained.
        start: folder with the job's start values.

    Raises:
        SpecError: the job's adapters do not include them.
    """
    wanted = 0 if asked is None else asked.rank
    if not rank:
        if wanted:
            why = f"has rank {wanted}, and this server trains all weights, without adapters"
            raise SpecError("lora_config", why, "ask for rank 0, or serve a job with model.lora")
        return Adapters(0)
    if not 1 <= wanted <= rank:
        why = f"has rank {wanted}, and this server trains adapters of rank 1 to {rank}"
        raise SpecError("lora_config", why, f"ask for at most {rank}, or serve a job with a larger model.lora.r")
    left_out = [kind for kind in LAYERS if not getattr(asked, kind)]
    if wanted < rank or left_out or asked.seed is not None:
        _check(start, rank, bool(left_out))
    without = "|".join(LAYERS[kind] for kind in left_out)
    if left_out and all(re.search(without, name) for name in _started(start)):
        raise SpecError("lora_config", f"leaves nothing to train without {', '.join(left_out)}", "leave one as it is")
    return Adapters(wanted, without, asked.seed)


def _started(start: Path) -> dict[str, Tensor]:
    """Return the start values of what is trained, by name."""
    files = start.glob(f"{WEIGHTS}-*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def _check(start: Path, rank: int, by_kind: bool) -> None:
    """Raise SpecError where adapters cannot begin as a part of the job's, or as others than these."""
    for name, value in _started(start).items():
        down, up = DOWN in name and value.shape[0] == rank, UP in name and value.shape[1] == rank
        if value.ndim != 2 or not (down or (up and not value.any())):
            why = f"asks for a part of the job's adapters, or other start values, and {name} has no part"
            raise SpecError("lora_config", why, f"ask for rank {rank}, all layers and no seed")
        if by_kind and not any(re.search(pattern, name) for pattern in LAYERS.values()):
            why = f"chooses layers, and {name} is of none of the kinds attention, MLP and unembedding"
            raise SpecError("lora_config", why, "leave train_mlp, train_attn and train_unembed as they are")


def check_loaded(ours: Adapters, theirs: Adapters, path: str) -> None:
    """Raise SpecError where the adapters of a checkpoint are not those of the model that loads it."""
    if ours[:2] != theirs[:2]:
        why = f"{path} has adapters of rank {theirs.rank}, and the model of {ours.rank}, or for other layers"
        raise SpecError("load_weights", why, "make a model of the checkpoint instead")


def check_eps(adapters: Adapters, rank: int, eps: float) -> None:
    """Raise SpecError where AdamW would divide by zero at what is beyond a model's adapters."""
    if eps == 0 and (adapters.rank < rank or adapters.without):
        why = f"is 0, and the adapters are a part of the job's, whose rest has gradients of zero (rank {rank})"
        raise SpecError("optim_step.eps", why, "use a number above 0")
