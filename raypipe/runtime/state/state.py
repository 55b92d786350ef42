"""Save and load a stage's parameters and optimizer state under names that do not depend on the plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.checkpoint import Checkpoint, buffer_key, rows_key
from raypipe.errors import CheckpointError
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.flat_weights import FlatPart, FlatWeights
from raypipe.runtime.update.gradients import TiedHolders
from raypipe.runtime.update.optimizer import load_master, updated_tensor
from raypipe.runtime.update.shards import ShardedStage
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.schedule.sharding import StageKey
from raypipe.tensor import Axis, Shard, TensorGroup

PREVIOUS = "previous"
"""State key of the weights before the last update, which PipeDream-2BW still uses."""
WHOLE: Mapping[Axis, int] = MappingProxyType({"tensor": 0, "experts": 0})
"""The ranks of a process that shares its layers with no other."""


def owned_keys(
    device: int,
    modules: Mapping[StageKey, StageModule],
    placement: tuple[tuple[int, ...], ...],
    expert_ranks: Sequence[int] | None = None,
) -> list[StageKey]:
    """Return the stage replicas that this device saves: those of which it is the first holder.

    ``expert_ranks``: which share of the experts each replica holds; each share has a first holder, which are a group.
    """
    of = expert_ranks or [0] * len(placement)
    return [
        (stage, replica)
        for stage, replica in sorted(modules)
        if (device, replica) == min((row[stage], r) for r, row in enumerate(placement) if of[r] == of[replica])
    ]


def _canonical(name: str, tied: tuple[TiedHolders, ...]) -> str:
    for tie in tied:
        if name in tie.parameters:
            return tie.name
    return name


def _saves(module: StageModule, name: str, tied: tuple[TiedHolders, ...]) -> bool:
    """Return whether this stage saves a parameter that it holds; tied parameters are saved by their first layer's."""
    return all(name not in tie.parameters or tie.layer in module.layers for tie in tied)


class TensorPiece(NamedTuple):
    """A tensor of a checkpoint, or this process's share of one."""

    key: str
    tensor: Tensor
    shard: Shard | None
    """How the tensor is divided; None if this is the whole tensor."""


def joined(pieces: Sequence[TensorPiece], groups: Mapping[Axis, TensorGroup]) -> dict[str, Tensor]:
    """Join the shares to whole tensors, and distribute these over the members of the groups for writing.

    All members of all groups must call this with the same keys in the same order; each gets its part of the tensors.
    """
    result: dict[str, Tensor] = {}
    for number, piece in enumerate(pieces):
        turn, writers = number, dict[Axis, int]()
        for axis, group in groups.items():
            turn, writers[axis] = divmod(turn, group.size)
        if any(
            groups[axis].rank != writer
            for axis, writer in writers.items()
            if piece.shard is None or axis != piece.shard.axis
        ):
            continue
        if piece.shard is None:
            result[piece.key] = piece.tensor
            continue
        axis = piece.shard.axis
        shares = groups[axis].gather(piece.tensor.contiguous(), writers[axis])
        if shares is not None:
            result[piece.key] = piece.shard.join([share.cpu() for share in shares])
    return result


def _stored(shard: Shard | None) -> tuple[str, bool, Shard | None]:
    """Return the end of a parameter's keys, whether this process stores what all its shares have alike, and how it is
    divided: rows that other stages have other ones of are stored as they are, beside those."""
    if shard is None or shard.own_rank is None:
        return "", True, shard
    return rows_key(shard.rows), shard.own_rank == 0, None


def state_pieces(
    module: StageModule,
    optimizer: torch.optim.Optimizer,
    tied: tuple[TiedHolders, ...],
    divided: Collection[str] = (),
) -> list[TensorPiece]:
    """Collect ``param/<name>``, ``optim/<name>/<key>`` and ``buffer/<name>`` (running statistics) of one stage.

    A tied parameter is saved once, under its group's name; of a parameter with a master weight, that is saved.
    Parameters that data-parallel copies divide (``divided``) are left out (``update.shards``).
    """
    result: list[TensorPiece] = []
    for name, parameter in module.named.items():
        if name in divided or not _saves(module, name, tied):
            continue
        rows, first, shard = _stored(module.shards.get(name))
        updated = updated_tensor(optimizer, parameter)
        result.append(TensorPiece(f"param/{name}{rows}", updated.detach(), shard))
        for key, value in sorted(optimizer.state.get(updated, {}).items()):
            if not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                result.append(TensorPiece(f"optim/{name}/{key}{rows}", value, shard))
            elif first:
                result.append(TensorPiece(f"optim/{name}/{key}", value, None))
    for one in module.statistics:
        result += [TensorPiece(buffer_key(name), value, None) for name, value in one.buffers_by_name.items()]
    return result


def not_finite(module: StageModule, pieces: Sequence[TensorPiece]) -> str | None:
    """Return the key of a piece with an infinite value or NaN; None if all are finite.

    Frozen parameters are not checked: they may legitimately hold infinities, as attention masks do.
    """
    untrained = [name for name in module.named if name not in module.trained]
    frozen = {f"param/{name}" for name in untrained} | {f"optim/{name}/{PREVIOUS}" for name in untrained}
    by_kind: dict[tuple[torch.device, torch.dtype], list[TensorPiece]] = {}
    for piece in pieces:
        if piece.tensor.is_floating_point() and piece.tensor.numel() and piece.key not in frozen:
            by_kind.setdefault((piece.tensor.device, piece.tensor.dtype), []).append(piece)
    for group in by_kind.values():
        for piece, largest in zip(group, _largest([piece.tensor for piece in group]).tolist(), strict=True):
            if not math.isfinite(largest):
                return piece.key
    return None


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor of one device and dtype, ``[tensors]``.

    Largest and smallest values are exact in every dtype and propagate NaN. On a GPU one launch, and one wait of the
    host, serve all tensors; on a CPU torch's norm takes ten times as long as these two.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, math.inf))
    return torch.stack([torch.stack(torch.aminmax(x)) for x in tensors]).abs().amax(1)


def read_state(
    checkpoint: Checkpoint,
    module: StageModule,
    optimizer: torch.optim.Optimizer,
    tied: tuple[TiedHolders, ...],
    ranks: Mapping[Axis, int] = WHOLE,
    stage: ShardedStage | None = None,
) -> None:
    """Load one stage's parameters and optimizer state (this process's shares), whichever plan wrote them.

    ``stage``: where data-parallel copies divide it, what this one has of them.

    Raises:
        CheckpointError: a parameter is missing or has another shape, so the checkpoint is of another model.
    """
    divided = frozenset[str]() if stage is None else stage.names
    places: list[tuple[str, nn.Parameter, FlatPart | None]] = [
        (name, p, None) for name, p in module.named.items() if name not in divided
    ]
    for flat in () if stage is None else stage.flats:
        first = next(iter(flat.parameters))  # the state of padding is like its
        places += [(part.name or first, p, part) for part, p in zip(flat.parts, flat.pieces, strict=True)]
    keys = sorted(checkpoint.keys)
    wanted: dict[str, list[str]] = {}
    for name in {name for name, *_ in places}:
        base = _canonical(name, tied)
        prefix = f"optim/{base}/"
        states = [k for k in keys if k.startswith(prefix) and not k.endswith(f"/{PREVIOUS}")]
        wanted[name] = [f"param/{base}", *states]
    buffers = {buffer_key(name): held for one in module.statistics for name, held in one.buffers_by_name.items()}
    tensors = checkpoint.read({k for ks in wanted.values() for k in ks} | set(buffers))
    for name, parameter, part in places:
        param_key, *optim_keys = wanted[name]
        shard = module.shards.get(name)
        whole = tuple(module.named[name].shape) if shard is None else shard.whole_shape(module.named[name].shape)
        if tuple(tensors[param_key].shape) != whole:
            raise CheckpointError(
                str(checkpoint.path),
                f"{param_key} has shape {tuple(tensors[param_key].shape)}, but the model's has {whole}",
                "resume with the job that wrote it",
            )
        if part is None or part.name is not None:
            load_master(optimizer, parameter, _own(tensors[param_key], shard, ranks, part, parameter))
        held = updated_tensor(optimizer, parameter)
        state = {}
        for key in optim_keys:
            value, field = tensors[key], key.rsplit("/", 1)[1]
            # torch counts updates in "step", whose shape is also that of a parameter without dimensions.
            if field != "step" and tuple(value.shape) == whole:
                value = _own(value, shard, ranks, part, parameter)
            state[field] = value.clone().to(parameter.device)
        if state:
            optimizer.state[held] = state
    for key, buffer in buffers.items():
        buffer.copy_(tensors[key])


def _own(
    whole: Tensor, shard: Shard | None, ranks: Mapping[Axis, int], part: FlatPart | None, parameter: Tensor
) -> Tensor:
    """Return what a process with these ranks has of a tensor, and of that the ``part`` in its shard."""
    own = whole if shard is None else shard.cut(whole, ranks.get(shard.axis, 0))
    if part is None:
        return own
    if part.name is None:
        return torch.zeros(parameter.shape, dtype=own.dtype)
    return own.reshape(-1)[part.begin : part.begin + part.size].view(parameter.shape)


def previous_pieces(
    module: StageModule, previous: Mapping[str, Tensor], tied: tuple[TiedHolders, ...]
) -> list[TensorPiece]:
    """Collect the weights before the last update as ``optim/<name>/previous``.

    ``previous`` holds them by parameter path in the module.
    """
    names = {id(p): name for name, p in module.named.items()}
    result = []
    for path, parameter in module.named_parameters():
        name = names[id(parameter)]
        if path in previous and _saves(module, name, tied):
            result.append(TensorPiece(f"optim/{name}/{PREVIOUS}", previous[path].detach(), module.shards.get(name)))
    return result


def read_previous(
    checkpoint: Checkpoint, module: StageModule, tied: tuple[TiedHolders, ...], ranks: Mapping[Axis, int] = WHOLE
) -> dict[str, Tensor]:
    """Read what ``previous_pieces`` wrote, by parameter path; empty if the checkpoint has none."""
    names = {path: name for path, p in module.named_parameters() for name, own in module.trained.items() if own is p}
    keys = {path: f"optim/{_canonical(name, tied)}/{PREVIOUS}" for path, name in names.items()}
    if not set(keys.values()) <= set(checkpoint.keys):
        return {}
    tensors = checkpoint.read(set(keys.values()))
    return {
        path: _own(tensors[key], module.shards.get(names[path]), ranks, None, p).to(p.device)
        for path, key in keys.items()
        for p in [module.get_parameter(path)]
    }


def gathered_state(
    flats: Sequence[FlatWeights], cuts: Mapping[str, Shard], optimizer: torch.optim.Optimizer
) -> list[tuple[str, Tensor, Shard | None]]:
    """Gather ``param/<name>`` and ``optim/<name>/<key>``, and distribute them over those who divide them for writing.

    All members of the group must call this. Each tensor is returned by one of them, in CPU memory, with how it is
    divided besides (``cuts``); the weights and every kind of optimizer state go to another member, so that all of them
    write.
    """
    result: list[tuple[str, Tensor, Shard | None]] = []
    turn = 0
    for flat in flats:
        pieces = [updated_tensor(optimizer, piece) for piece in flat.pieces]
        states = optimizer.state.get(pieces[0], {})
        for key, value in [("", pieces[0].detach()), *sorted(states.items())]:
            if not isinstance(value, Tensor):
                continue
            writer, turn = turn % flat.group.size(), turn + 1
            if value.shape != pieces[0].shape:  # one number for all parameters, e.g. how many updates there were
                if flat.group.rank() == writer:
                    first = [name for name in flat.parameters if _stored(cuts.get(name))[1]]
                    result += [(f"optim/{name}/{key}", value.clone(), None) for name in first]
                continue
            own = [p.detach() if not key else optimizer.state[p][key] for p in pieces]
            whole = _gather(torch.cat([part.reshape(-1) for part in own]), flat, writer)
            if whole is not None:
                for name, offset in flat.layout.offsets.items():
                    p = flat.parameters[name]
                    rows, _, cut = _stored(cuts.get(name))
                    value_key = f"optim/{name}/{key}{rows}" if key else f"param/{name}{rows}"
                    result.append((value_key, whole[offset : offset + p.numel()].view(p.shape), cut))
    return result


def _gather(shard: Tensor, flat: FlatWeights, writer: int) -> Tensor | None:
    shards = [torch.empty_like(shard) for _ in range(flat.group.size())] if flat.group.rank() == writer else None
    dist.gather(shard, shards, group=flat.group, group_dst=writer)
    return torch.cat(shards).cpu() if shards is not None else None


# What a worker saves: the parameters and optimizer state of the stages whose first holder is its device.


def state_to_save(
    setup: Setup,
    modules: Mapping[StageKey, StageModule],
    optimizers: Mapping[StageKey, torch.optim.Optimizer],
    versions: Mapping[StageKey, WeightVersions],
    shards: Mapping[StageKey, ShardedStage],
    groups: Mapping[Axis, TensorGroup],
) -> tuple[dict[str, Tensor], str | None]:
    """Return this worker's share of a checkpoint, and the key of a tensor that is infinite or not a number, if any.

    Tensor-parallel ranks of a device share the work, as do copies that divide experts, and the members of a shard
    group; each has whole parameters. All of them must call this. Most of the tensors are those of the training
    itself, so they change with its next step.
    """
    state: list[TensorPiece] = []
    broken: str | None = None
    for key in owned_keys(setup.device, modules, setup.placement, setup.expert_ranks):
        divided = shards[key].names if key in shards else frozenset[str]()
        pieces = state_pieces(modules[key], optimizers[key], setup.tied, divided)
        if key in versions:
            pieces += previous_pieces(modules[key], versions[key].previous(), setup.tied)
        broken = broken or not_finite(modules[key], pieces)
        state += pieces
    tensors = joined(state, groups)
    for key, stage in sorted(shards.items()):
        for experts in (False, True) if stage.writes else ():
            flats = stage.of_experts(experts)
            gathered = [TensorPiece(*one) for one in gathered_state(flats, stage.cuts, optimizers[key])]
            broken = broken or not_finite(modules[key], gathered)
            # Copies that divide experts have the same tensors of those to join, and different ones of all others.
            tensors |= joined(gathered, {axis: group for axis, group in groups.items() if experts or axis == "tensor"})
    return tensors, broken
