"""A stage's parameters and optimizer state under plan-independent names, for checkpoints that any plan can read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.checkpoint import Checkpoint, buffer_key
from raypipe.errors import CheckpointError
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import StageKey, TiedHolders
from raypipe.tensor import Shard, TensorGroup

PREVIOUS = "previous"
"""State key of the weights before the last update, which PipeDream-2BW still trains on."""


def owned_keys(
    device: int, modules: Mapping[StageKey, StageModule], placement: tuple[tuple[int, ...], ...]
) -> list[StageKey]:
    """The stage replicas that this device saves: those of which it is the first holder."""
    return [
        (stage, replica)
        for stage, replica in sorted(modules)
        if (device, replica) == min((held[stage], r) for r, held in enumerate(placement))
    ]


def _canonical(name: str, tied: tuple[TiedHolders, ...]) -> str:
    for tie in tied:
        if name in tie.parameters:
            return tie.name
    return name


def _saves(module: StageModule, name: str, tied: tuple[TiedHolders, ...]) -> bool:
    """Whether this stage saves a parameter that it holds: of a tied one, the stage of its first member does."""
    return all(name not in tie.parameters or tie.layer in module.layers for tie in tied)


class Piece(NamedTuple):
    """A tensor of a checkpoint, or this member's share of one."""

    key: str
    tensor: Tensor
    shard: Shard | None


def joined(pieces: Sequence[Piece], group: TensorGroup) -> dict[str, Tensor]:
    """Whole tensors, of which each member of a device gets some, to write them; all members call this alike."""
    found: dict[str, Tensor] = {}
    for number, piece in enumerate(pieces):
        writer = number % group.size
        if piece.shard is None:
            whole = piece.tensor if group.rank == writer else None
        else:
            shares = group.gather(piece.tensor.contiguous(), writer)
            whole = piece.shard.join([share.cpu() for share in shares]) if shares is not None else None
        if whole is not None:
            found[piece.key] = whole
    return found


def state_pieces(module: StageModule, optimizer: torch.optim.Optimizer, tied: tuple[TiedHolders, ...]) -> list[Piece]:
    """``param/<name>``, ``optim/<name>/<key>`` and ``buffer/<name>`` (running statistics) of one stage.

    A tied parameter under its group's name only.
    """
    found: list[Piece] = []
    for name, parameter in module.named.items():
        if not _saves(module, name, tied):
            continue
        shard = module.shards.get(name)
        found.append(Piece(f"param/{name}", parameter.detach(), shard))
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                found.append(Piece(f"optim/{name}/{key}", value, shard if value.shape == parameter.shape else None))
    for one in module.statistics:
        found += [Piece(buffer_key(name), value, None) for name, value in one.buffers_by_name.items()]
    return found


def not_finite(module: StageModule, pieces: Sequence[Piece]) -> str | None:
    """The key of a piece that holds an infinite value or none at all; None if there is no such.

    What is not trained may hold what it likes: a mask, say.
    """
    still = [name for name in module.named if name not in module.trained]
    frozen = {f"param/{name}" for name in still} | {f"optim/{name}/{PREVIOUS}" for name in still}
    alike: dict[tuple[torch.device, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        if piece.tensor.is_floating_point() and piece.tensor.numel() and piece.key not in frozen:
            alike.setdefault((piece.tensor.device, piece.tensor.dtype), []).append(piece)
    for some in alike.values():
        # The largest magnitude, which is exact in every dtype and passes NaN on: one wait for the device for all.
        largest = torch.stack(torch._foreach_norm([piece.tensor for piece in some], math.inf))
        if not bool(torch.isfinite(largest).all()):
            return some[int(torch.isfinite(largest).logical_not().nonzero()[0])].key
    return None


def read_state(
    checkpoint: Checkpoint,
    module: StageModule,
    optimizer: torch.optim.Optimizer,
    tied: tuple[TiedHolders, ...],
    tensor_rank: int = 0,
) -> None:
    """Load one stage's parameters and optimizer state, whatever plan wrote them: a member's shares of them.

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
    buffers = {buffer_key(name): held for one in module.statistics for name, held in one.buffers_by_name.items()}
    tensors = checkpoint.read({k for ks in wanted.values() for k in ks} | set(buffers))
    for name, parameter in module.named.items():
        param_key, *optim_keys = wanted[name]
        saved, shard = tensors[param_key], module.shards.get(name)
        whole = tuple(parameter.shape) if shard is None else shard.whole_shape(parameter.shape)
        if tuple(saved.shape) != whole:
            raise CheckpointError(
                str(checkpoint.path),
                f"{param_key} has shape {tuple(saved.shape)}, the model's has {whole}",
                "resume with the job that wrote it",
            )
        with torch.no_grad():
            parameter.copy_(_own(saved, shard, tensor_rank))
        if optim_keys:
            values = {k.rsplit("/", 1)[1]: tensors[k] for k in optim_keys}
            optimizer.state[parameter] = {
                key: _own(value, shard if tuple(value.shape) == whole else None, tensor_rank)
                .clone()
                .to(parameter.device)
                for key, value in values.items()
            }
    for key, held in buffers.items():
        held.copy_(tensors[key])


def _own(whole: Tensor, shard: Shard | None, tensor_rank: int) -> Tensor:
    return whole if shard is None else shard.cut(whole, tensor_rank)


def previous_pieces(module: StageModule, previous: Mapping[str, Tensor], tied: tuple[TiedHolders, ...]) -> list[Piece]:
    """The version before the newest, ``optim/<name>/previous``; ``previous`` is by parameter path in the module."""
    names = {id(p): name for name, p in module.named.items()}
    found = []
    for path, parameter in module.named_parameters():
        name = names[id(parameter)]
        if path in previous and _saves(module, name, tied):
            found.append(Piece(f"optim/{name}/{PREVIOUS}", previous[path].detach(), module.shards.get(name)))
    return found


def read_previous(
    checkpoint: Checkpoint, module: StageModule, tied: tuple[TiedHolders, ...], tensor_rank: int = 0
) -> dict[str, Tensor]:
    """What ``previous_pieces`` wrote, by parameter path; empty where the checkpoint has none."""
    names = {path: name for path, p in module.named_parameters() for name, own in module.named.items() if own is p}
    keys = {path: f"optim/{_canonical(name, tied)}/{PREVIOUS}" for path, name in names.items()}
    if not set(keys.values()) <= set(checkpoint.keys):
        return {}
    tensors = checkpoint.read(set(keys.values()))
    return {
        path: _own(tensors[key], module.shards.get(names[path]), tensor_rank).to(module.get_parameter(path).device)
        for path, key in keys.items()
    }
