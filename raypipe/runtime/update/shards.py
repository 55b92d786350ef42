"""Stages whose weights, gradients or optimizer state data-parallel copies divide. ``GradientSync`` has their tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.backward.split_backward import weights_of_products
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.flat_weights import FlatWeights
from raypipe.runtime.update.optimizer import ParameterPiece, whole_costs
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import ShardMember, StageKey, shard_members


class ShardedStage:
    """A stage replica whose weights, gradients or optimizer state its data-parallel copies divide.

    Args:
        module: the stage; the trained parameters' values are moved into flat tensors.
        stage: its number, for errors.
        level: ZeRO level, 1 to 3.
        group: the data-parallel copies that divide it; the rank in it is the number of this device's shard.
        others: the devices that hold the same shard of other groups of copies or directions; None if there are none.
        undivided: names of parameters that stay whole, e.g. those tied to another stage.
        reduce_dtype: in which gradients are summed; None for their own.
        counts: whether this shard counts in the global norm; the other holders of the same shard say no.
        costs: of the update of each parameter that must lie in one shard, by name.
        gather_dtype: in which the parameters ``cast`` are gathered, at level 3.
        cast: parameters that the stage only reads in ``gather_dtype``.
    """

    def __init__(
        self,
        module: StageModule,
        stage: int,
        level: int,
        group: dist.ProcessGroup,
        others: dist.ProcessGroup | None,
        undivided: Collection[str] = (),
        counts: bool = True,
        reduce_dtype: torch.dtype | None = None,
        costs: Mapping[str, float] | None = None,
        gather_dtype: torch.dtype | None = None,
        cast: Collection[nn.Parameter] = (),
    ) -> None:
        self.group, self.others, self.counts, costs = group, others, counts, costs or {}
        self.cuts = module.shards
        """How tensor ranks divide parameters, by name; of others, nothing."""
        # What tensor ranks hold alike lies apart from what they divide: its gradients count once in the global norm.
        alike: dict[tuple[torch.dtype, bool, torch.dtype | None, bool], dict[str, nn.Parameter]] = {}
        for name, p in module.trained.items():
            if name not in undivided:
                narrow = gather_dtype if level == 3 and p in cast else None
                alike.setdefault((p.dtype, name in costs, narrow, name in self.cuts), {})[name] = p
        self.flats = [
            FlatWeights(some, group, level, stage, reduce_dtype, {n: costs[n] for n in some} if whole else None, narrow)
            for (_, whole, narrow, _), some in alike.items()
        ]
        self.names = frozenset(name for flat in self.flats for name in flat.parameters)
        """The parameters that are divided."""
        self.pieces = [piece for flat in self.flats for piece in flat.pieces]
        """The parameters that this device's optimizer updates."""

    def counted(self, tensor_rank: int) -> list[nn.Parameter]:
        """Return those of ``pieces`` whose gradients this process counts in the global norm: what the tensor ranks of a
        device hold alike, the first one counts."""
        flats = [flat for flat in self.flats if tensor_rank == 0 or next(iter(flat.parameters)) in self.cuts]
        return [piece for flat in flats for piece in flat.pieces] if self.counts else []

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of the groups and of what is under way on them, for good; return them."""
        held = [self.group] if self.others is None else [self.group, self.others]
        for flat in self.flats:
            flat.leave()
        del self.group
        self.others = None
        return held


def updated(module: StageModule, stage: ShardedStage | None) -> tuple[dict[str, nn.Parameter], list[ParameterPiece]]:
    """Return what the optimizer of a stage replica updates: whole parameters, and its pieces of divided ones."""
    if stage is None:
        return module.trained, []
    pieces = [
        ParameterPiece(p, part.name or "", p.dim() if part.name is None else flat.parameters[part.name].dim())
        for flat in stage.flats
        for part, p in zip(flat.parts, flat.pieces, strict=True)
    ]
    return {name: p for name, p in module.trained.items() if name not in stage.names}, pieces


# The groups that divide the stages of a device.


def shard_groups(sharding: Sharding | None, placement: tuple[tuple[int, ...], ...]) -> dict[str, tuple[int, ...]]:
    """Return the process groups that sharding needs, by name: who divides a stage, and who holds the same shard."""
    wanted: dict[str, tuple[int, ...]] = {}
    for (stage, _), member in shard_members(sharding, placement).items():
        wanted[dividing_group(stage, member)] = member.group
        wanted[same_shard_group(stage, member)] = member.others
    return {name: devices for name, devices in wanted.items() if len(devices) > 1}


def dividing_group(stage: int, member: ShardMember) -> str:
    """Return the name of the group that gathers a sharded stage's weights and reduce-scatters its gradients."""
    return f"shards of stage {stage}, {member.group[0]}"


def same_shard_group(stage: int, member: ShardMember) -> str:
    """Return the name of the group that all-reduces one shard of a stage's gradients."""
    return f"shard {member.number} of stage {stage}"


def divide(
    modules: Mapping[StageKey, StageModule],
    sharding: Sharding | None,
    placement: tuple[tuple[int, ...], ...],
    undivided: Collection[str],
    groups: Mapping[str, dist.ProcessGroup],
    reduce_dtype: torch.dtype | None = None,
    train: TrainSpec | None = None,
) -> dict[StageKey, ShardedStage]:
    """Divide a device's stages as the schedule says; their parameters become views of flat tensors.

    ``undivided``: names of parameters that stay whole, which others hold as well; ``reduce_dtype``: in which gradients
    are summed; None for their own; ``train``: says the optimizer, which may read whole matrices, and the arithmetic.
    """
    # torch before 2.10 has no gradients wider than their parameter.
    narrow = train is not None and train.gathers_narrow and hasattr(Tensor, "grad_dtype")
    result: dict[StageKey, ShardedStage] = {}
    for key, member in shard_members(sharding, placement).items():
        module, stage = modules.get(key), key[0]
        if sharding is None or module is None or len(member.group) == 1:  # a group of one divides nothing
            continue
        result[key] = ShardedStage(
            module,
            stage,
            sharding.levels[stage],
            groups[dividing_group(stage, member)],
            groups.get(same_shard_group(stage, member)),
            undivided,
            counts=placement[0][stage] in member.group,
            reduce_dtype=reduce_dtype,
            costs={} if train is None else whole_costs(train, module.trained),
            gather_dtype=torch.bfloat16 if narrow else None,
            cast=weights_of_products(module) if narrow else (),
        )
    return result
