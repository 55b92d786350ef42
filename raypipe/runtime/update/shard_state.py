"""Save and load a sharded stage under the same keys as one that is not: a checkpoint knows nothing of shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.checkpoint import Checkpoint
from raypipe.errors import CheckpointError
from raypipe.runtime.update.flat_weights import FlatWeights
from raypipe.runtime.update.optimizer import load_master, updated_tensor
from raypipe.runtime.update.shards import ShardedStage


def gathered_state(stage: ShardedStage, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Gather ``param/<name>`` and ``optim/<name>/<key>`` of a stage, and distribute them over its members for writing.

    All members of the stage's shard group must call this. Each tensor is returned by one of them, in CPU memory; the
    weights and every kind of optimizer state go to another member, so that all of them write.
    """
    found: dict[str, Tensor] = {}
    turn = 0
    for flat in stage.flats:
        pieces = [updated_tensor(optimizer, piece) for piece in flat.pieces]
        states = optimizer.state.get(pieces[0], {})
        for key, value in [("", pieces[0].detach()), *sorted(states.items())]:
            if not isinstance(value, Tensor):
                continue
            writer, turn = turn % stage.group.size(), turn + 1
            if value.shape != pieces[0].shape:  # one number for all parameters, e.g. how many updates there were
                if stage.group.rank() == writer:
                    found |= {f"optim/{name}/{key}": value.clone() for name in flat.parameters}
                continue
            own = [p.detach() if not key else optimizer.state[p][key] for p in pieces]
            whole = _gather(torch.cat([part.reshape(-1) for part in own]), flat, writer)
            if whole is not None:
                for name, offset in flat.layout.offsets.items():
                    p = flat.parameters[name]
                    value_key = f"optim/{name}/{key}" if key else f"param/{name}"
                    found[value_key] = whole[offset : offset + p.numel()].view(p.shape)
    return found


def _gather(shard: Tensor, flat: FlatWeights, writer: int) -> Tensor | None:
    shards = [torch.empty_like(shard) for _ in range(flat.group.size())] if flat.group.rank() == writer else None
    dist.gather(shard, shards, group=flat.group, group_dst=writer)
    return torch.cat(shards).cpu() if shards is not None else None


def read_shards(checkpoint: Checkpoint, stage: ShardedStage, optimizer: torch.optim.Optimizer) -> None:
    """Load this member's shard of the weights and of the optimizer state.

    Raises:
        CheckpointError: a parameter is missing or has another shape, so the checkpoint is of another model.
    """
    for flat in stage.flats:
        tensors = checkpoint.read({f"param/{part.name}" for part in flat.parts if part.name is not None})
        for part, piece in zip(flat.parts, flat.pieces, strict=True):
            if part.name is not None:
                saved = tensors[f"param/{part.name}"]
                _check(checkpoint, f"param/{part.name}", saved, flat.parameters[part.name])
                load_master(optimizer, piece, saved.reshape(-1)[part.begin : part.begin + part.size])
        _read_optimizer(checkpoint, flat, optimizer)


def _check(checkpoint: Checkpoint, key: str, saved: Tensor, parameter: Tensor) -> None:
    if saved.shape != parameter.shape:
        raise CheckpointError(
            str(checkpoint.path),
            f"{key} has shape {tuple(saved.shape)}, but the model's has {tuple(parameter.shape)}",
            "resume with the job that wrote it",
        )


def _read_optimizer(checkpoint: Checkpoint, flat: FlatWeights, optimizer: torch.optim.Optimizer) -> None:
    fields, first = _state_fields(checkpoint, flat), next(iter(flat.parameters))
    names = {part.name for part in flat.parts if part.name is not None} | {first}
    tensors = checkpoint.read({f"optim/{name}/{field}" for name in names for field in fields})
    for part, piece in zip(flat.parts, flat.pieces, strict=True):
        state: dict[str, Tensor] = {}
        name = part.name or first
        for field in fields:
            saved = tensors[f"optim/{name}/{field}"]
            # torch counts updates in "step", whose shape is also that of a parameter without dimensions.
            if field == "step" or saved.shape != flat.parameters[name].shape:
                state[field] = saved.clone().to(piece.device)
            elif part.name is None:
                state[field] = torch.zeros_like(updated_tensor(optimizer, piece))
            else:
                state[field] = saved.reshape(-1)[part.begin : part.begin + part.size].clone().to(piece.device)
        if state:
            optimizer.state[updated_tensor(optimizer, piece)] = state


def _state_fields(checkpoint: Checkpoint, flat: FlatWeights) -> list[str]:
    """Return the optimizer's fields in the checkpoint; empty if it was written before the first update."""
    prefix = f"optim/{next(iter(flat.parameters))}/"
    return sorted(key.removeprefix(prefix) for key in checkpoint.keys if key.startswith(prefix))
