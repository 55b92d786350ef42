"""Stages whose weights, gradients or optimizer state data-parallel copies divide. ``GradientSync`` has their tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.backward.split_backward import weights_of_products
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.flat_weights import FlatWeights
from raypipe.runtime.update.optimizer import ParameterPiece, whole_costs
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import StageKey, dividing_group, same_shard_group, shard_members


class Holders(NamedTuple):
    """Who divides some parameters of a stage replica."""

    group: dist.ProcessGroup
    """The data-parallel copies that divide them; the rank in it is the number of this device's shard."""
    others: dist.ProcessGroup | None = None
    """The devices that hold the same shard of other groups of copies or directions; None if there are none."""
    counts: bool = True
    """Whether this shard counts in the global norm; the other holders of the same shard say no."""


class ShardedStage:
    """A stage replica whose weights, gradients or optimizer state its data-parallel copies divide.

    Args:
        module: the stage; the trained parameters' values are moved into flat tensors.
        stage: its number, for errors.
        level: ZeRO level, 1 to 3.
        holders: who divides it.
        experts: who divides what this device has of experts that copies divide already; None: nobody does.
        undivided: names of other parameters that stay whole, e.g. those tied to another stage.
        reduce_dtype: in which gradients are summed; None for their own.
        costs: of the update of each parameter that must lie in one shard, by name.
        gather_dtype: in which the parameters ``cast`` are gathered, at level 3.
        cast: parameters that the stage only reads in ``gather_dtype``.
    """

    def __init__(
        self,
        module: StageModule,
        stage: int,
        level: int,
        holders: Holders,
        experts: Holders | None = None,
        undivided: Collection[str] = (),
        reduce_dtype: torch.dtype | None = None,
        costs: Mapping[str, float] | None = None,
        gather_dtype: torch.dtype | None = None,
        cast: Collection[nn.Parameter] = (),
    ) -> None:
        self.holders, costs = (holders, *([] if experts is None else [experts])), costs or {}
        self.cuts = module.shards
        """How tensor ranks, or copies with other experts, divide parameters, by name; of others, nothing."""
        # What tensor ranks hold alike lies apart from what they divide: its gradients count once in the global norm.
        alike: dict[tuple[torch.dtype, bool, torch.dtype | None, str], dict[str, nn.Parameter]] = {}
        for name, p in module.trained.items():
            axis: str = self.cuts[name].axis if name in self.cuts else ""
            if name not in undivided and (axis != "experts" or experts is not None):
                narrow = gather_dtype if level == 3 and p in cast else None
                alike.setdefault((p.dtype, name in costs, narrow, axis), {})[name] = p
        self.flats: list[FlatWeights] = []
        self._of: list[tuple[Holders, str]] = []
        """Of each of them, who divides it, and what has divided it before: "tensor", "experts" or nothing."""
        for (_, whole, narrow, axis), some in alike.items():
            by = experts if experts is not None and axis == "experts" else holders
            own = {n: costs[n] for n in some} if whole else None
            self.flats.append(FlatWeights(some, by.group, by.others, level, stage, reduce_dtype, own, narrow))
            self._of.append((by, axis))
        self.names = frozenset(name for flat in self.flats for name in flat.parameters)
        """The parameters that are divided."""
        self.pieces = [piece for flat in self.flats for piece in flat.pieces]
        """The parameters that this device's optimizer updates."""

    def counted(self, tensor_rank: int) -> list[nn.Parameter]:
        """Return those of ``pieces`` whose gradients this process counts in the global norm: what the tensor ranks of a
        device hold alike, the first one counts."""
        return [
            piece
            for flat, (by, axis) in zip(self.flats, self._of, strict=True)
            if by.counts and (tensor_rank == 0 or axis == "tensor")
            for piece in flat.pieces
        ]

    @property
    def writes(self) -> bool:
        """Return whether checkpoints get this device's shards: it is in the first group."""
        return self.holders[0].counts

    def of_experts(self, theirs: bool) -> list[FlatWeights]:
        """Return the flat tensors of divided experts, or all others."""
        return [flat for flat, (_, axis) in zip(self.flats, self._of, strict=True) if (axis == "experts") == theirs]

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of the groups and of what is under way on them, for good; return them."""
        held = [group for one in self.holders for group in (one.group, one.others) if group is not None]
        for flat in self.flats:
            flat.leave()
        self.holders, self._of = (), []
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


def divide(
    modules: Mapping[StageKey, StageModule],
    sharding: Sharding | None,
    placement: tuple[tuple[int, ...], ...],
    undivided: Collection[str],
    groups: Mapping[str, dist.ProcessGroup],
    reduce_dtype: torch.dtype | None = None,
    train: TrainSpec | None = None,
    shares: Sequence[int] = (),
) -> dict[StageKey, ShardedStage]:
    """Divide a device's stages as the schedule says; their parameters become views of flat tensors.

    Args:
        modules: the device's stage replicas.
        sharding: of the schedule.
        placement: device of each stage, per replica.
        undivided: names of parameters that stay whole, which others hold as well.
        groups: process groups, named by ``sum_groups``.
        reduce_dtype: in which gradients are summed; None for their own.
        train: says the optimizer, which may read whole matrices, and the arithmetic.
        shares: which share of the experts each replica holds; the members of a shard group with the same one divide it.
    """
    # torch before 2.10 has no gradients wider than their parameter.
    narrow = train is not None and train.gathers_narrow and hasattr(Tensor, "grad_dtype")
    result: dict[StageKey, ShardedStage] = {}
    of_experts = shard_members(sharding, placement, shares) if any(shares) else {}
    for key, member in shard_members(sharding, placement).items():
        module, stage = modules.get(key), key[0]
        if sharding is None or module is None or len(member.group) == 1:  # a group of one divides nothing
            continue
        holders = Holders(
            groups[dividing_group(stage, member)],
            groups.get(same_shard_group(stage, member)),
            placement[0][stage] in member.group,
        )
        experts = None
        if (theirs := of_experts.get(key)) is not None and len(theirs.group) > 1:
            share = shares[key[1]]
            experts = Holders(
                groups[dividing_group(stage, theirs, share)],
                groups.get(same_shard_group(stage, theirs, share)),
                placement[shares.index(share)][stage] in theirs.group,
            )
        result[key] = ShardedStage(
            module,
            stage,
            sharding.levels[stage],
            holders,
            experts,
            undivided,
            reduce_dtype=reduce_dtype,
            costs={} if train is None else whole_costs(train, module.trained),
            gather_dtype=torch.bfloat16 if narrow else None,
            cast=weights_of_products(module) if narrow else (),
        )
    return result
