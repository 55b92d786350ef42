"""What a worker saves: the parameters and optimizer state of the stages whose first holder is its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.shard.device_shards import DeviceShards
from raypipe.runtime.shard.state import gathered_state
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.state.state import Piece, joined, not_finite, owned_keys, previous_pieces, state_pieces
from raypipe.runtime.update.gradients import StageKey
from raypipe.runtime.update.weight_versions import WeightVersions
from raypipe.tensor import TensorGroup


def state_to_save(
    setup: Setup,
    modules: Mapping[StageKey, StageModule],
    optimizers: Mapping[StageKey, torch.optim.Optimizer],
    versions: Mapping[StageKey, WeightVersions],
    shards: DeviceShards,
    group: TensorGroup,
) -> tuple[dict[str, Tensor], str | None]:
    """Return this worker's share of a checkpoint, and the key of a tensor that is infinite or not a number, if any.

    Tensor-parallel ranks of a device share the work, as do the members of a shard group; each has whole parameters. All
    of them must call this. Most of the tensors are those of the training itself, so they change with its next step.
    """
    state: list[Piece] = []
    broken: str | None = None
    for key in owned_keys(setup.device, modules, setup.placement):
        divided = shards.stages[key].names if key in shards.stages else frozenset[str]()
        pieces = state_pieces(modules[key], optimizers[key], setup.tied, divided)
        if key in versions:
            pieces += previous_pieces(modules[key], versions[key].previous(), setup.tied)
        broken = broken or not_finite(modules[key], pieces)
        state += pieces
    for key, stage in sorted(shards.stages.items()):
        if stage.counts:
            gathered = [Piece(k, value, None) for k, value in gathered_state(stage, optimizers[key]).items()]
            broken = broken or not_finite(modules[key], gathered)
            state += gathered
    return joined(state, group), broken
