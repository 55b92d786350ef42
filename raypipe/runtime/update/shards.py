"""Stages whose weights, gradients or optimizer state data-parallel copies divide; what AG, FREE and RS do."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.checkpoint import Checkpoint
from raypipe.errors import CheckpointError
from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.backward.split_backward import weights_of_products
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.collectives import Push, start_all_reduce, wait_for
from raypipe.runtime.update.flat_weights import FlatPart, FlatWeights
from raypipe.runtime.update.optimizer import ParameterPiece, load_master, updated_tensor, whole_costs
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import ShardMember, StageKey, shard_members
from raypipe.tensor import Axis, Shard

# One stage replica whose weights, gradients or optimizer state its data-parallel copies divide.


NONE: Mapping[str, float] = MappingProxyType({})


class ShardedStage:
    """Gathers weights and reduces gradients of a stage replica when its schedule says so.

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
        costs: Mapping[str, float] = NONE,
        gather_dtype: torch.dtype | None = None,
        cast: Collection[nn.Parameter] = (),
    ) -> None:
        self._reduce_dtype = reduce_dtype
        self.stage, self.level, self.group, self.others, self.counts = stage, level, group, others, counts
        self.cuts = module.shards
        """How tensor ranks divide parameters, by name; of others, nothing."""
        # What tensor ranks hold alike lies apart from what they divide: its gradients count once in the global norm.
        alike: dict[tuple[torch.dtype, bool, torch.dtype | None, bool], dict[str, nn.Parameter]] = {}
        for name, p in module.trained.items():
            if name not in undivided:
                narrow = gather_dtype if level == 3 and p in cast else None
                alike.setdefault((p.dtype, name in costs, narrow, name in self.cuts), {})[name] = p
        self.flats = [
            FlatWeights(some, group, level, reduce_dtype, {n: costs[n] for n in some} if whole else None, narrow)
            for (_, whole, narrow, _), some in alike.items()
        ]
        self.names = frozenset(name for flat in self.flats for name in flat.parameters)
        """The parameters that are divided."""
        self.all_gathers = self.reduce_scatters = self.all_reduces = 0.0
        """Collectives since the last reset; each member counts its share of one."""

    @property
    def pieces(self) -> list[nn.Parameter]:
        """Return the parameters that this device's optimizer updates."""
        return [piece for flat in self.flats for piece in flat.pieces]

    def counted(self, tensor_rank: int) -> list[nn.Parameter]:
        """Return those of ``pieces`` whose gradients this process counts in the global norm: what the tensor ranks of a
        device hold alike, the first one counts."""
        flats = [flat for flat in self.flats if tensor_rank == 0 or next(iter(flat.parameters)) in self.cuts]
        return [piece for flat in flats for piece in flat.pieces] if self.counts else []

    @property
    def named_pieces(self) -> list[ParameterPiece]:
        """The same, each with the parameter that it is a part of."""
        return [
            ParameterPiece(piece, "", piece.dim())
            if part.name is None
            else ParameterPiece(piece, part.name, flat.parameters[part.name].dim())
            for flat in self.flats
            for part, piece in zip(flat.parts, flat.pieces, strict=True)
        ]

    def gather(self) -> None:
        """Start to gather the weights (AG)."""
        for flat in self.flats:
            flat.gather()
        self.all_gathers += 1 / self.group.size()

    def wait_gathered(self, push: Push) -> None:
        """Wait until the weights may be read.

        Raises:
            TransportError: another copy did not join in time.
        """
        for flat in self.flats:
            work = flat.take_gathering()
            if work is not None:
                wait_for(f"weight gather of stage {self.stage}", work, push)

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of the groups and of what is under way on them, for good; return them."""
        held = [self.group] if self.others is None else [self.group, self.others]
        for flat in self.flats:
            flat.leave()
        del self.group
        self.others = None
        return held

    def release(self) -> None:
        """Drop the gathered weights (FREE)."""
        for flat in self.flats:
            flat.release()

    @property
    def accumulates(self) -> bool:
        """Return whether gradients accumulate in flat tensors now."""
        return any(flat.gradients.opened for flat in self.flats)

    def open_gradients(self) -> None:
        """Let gradients accumulate in flat tensors."""
        for flat in self.flats:
            flat.gradients.open()

    def reduce_scatter(self) -> None:
        """Start to reduce the gradients so far to this device's shard (RS)."""
        for flat in self.flats:
            flat.reduce_scatter()
        self.reduce_scatters += 1 / self.group.size()

    def add_oldest(self, push: Push) -> None:
        """Wait for the oldest reduce-scatter that is under way, and add its result to this device's shard.

        Raises:
            TransportError: another copy did not join in time.
        """
        for flat in self.flats:
            wait_for(f"gradient reduce-scatter of stage {self.stage}", flat.scattering, push)
            flat.add_oldest()

    def sum_groups(self, push: Push) -> None:
        """Sum this device's shard of the gradients over the other groups of copies, and hand it to the optimizer."""
        if self.others is not None:
            self.all_reduces += 1 / self.others.size()
        for flat in self.flats:
            if self.others is not None:
                work = start_all_reduce(flat.gradient_shard, self.others, self._reduce_dtype)
                wait_for(f"gradient sum of stage {self.stage} over groups of copies", work, push)
            flat.set_gradients()

    def drop_gradients(self) -> None:
        """Drop all gradients, after the update."""
        for flat in self.flats:
            flat.drop_gradients()


# All sharded stages of a device, and the groups that divide them.


SCATTERS = 1
"""Reduce-scatters of a device that may be under way when gradients get another buffer (``schedule.deps``)."""


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


class DeviceShards:
    """Carries out the AG, FREE and RS tasks of a device; ``stages`` are its sharded ones."""

    def __init__(self, stages: Mapping[StageKey, ShardedStage]) -> None:
        self.stages = dict(stages)
        self._scattering: deque[StageKey] = deque()

    def divided(self, key: StageKey) -> frozenset[str]:
        """Return the names of a stage replica's parameters that its copies divide."""
        stage = self.stages.get(key)
        return stage.names if stage is not None else frozenset()

    def updated(self, key: StageKey, module: StageModule) -> tuple[dict[str, nn.Parameter], list[ParameterPiece]]:
        """Return what the optimizer of a stage replica updates: whole parameters, and its pieces of divided ones."""
        divided = self.divided(key)
        whole = {name: p for name, p in module.trained.items() if name not in divided}
        return whole, self.stages[key].named_pieces if divided else []

    def open_gradients(self, key: StageKey, push: Push) -> None:
        """Let a stage's gradients accumulate; first wait until few enough earlier ones are still being reduced.

        Raises:
            TransportError: another copy did not join in time.
        """
        stage = self.stages[key]
        if not stage.accumulates:
            self._finish(push, SCATTERS)
            stage.open_gradients()

    def reduce_scatter(self, key: StageKey) -> None:
        """Carry out an RS."""
        self.stages[key].reduce_scatter()
        self._scattering.append(key)

    def finish(self, push: Push) -> None:
        """Wait until this device's shards of all gradients are complete, and hand them to the optimizers."""
        self._finish(push, 0)
        for key in sorted(self.stages):
            self.stages[key].sum_groups(push)

    def _finish(self, push: Push, left: int) -> None:
        while len(self._scattering) > left:
            self.stages[self._scattering.popleft()].add_oldest(push)

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of all groups and of what is under way on them, for good; return them."""
        self._scattering.clear()
        return [group for stage in self.stages.values() for group in stage.leave()]

    def take_counts(self) -> tuple[float, float, float]:
        """Return this device's share of the gathers, reduce-scatters and all-reduces since the last call."""
        gathers = sum(stage.all_gathers for stage in self.stages.values())
        scatters = sum(stage.reduce_scatters for stage in self.stages.values())
        sums = sum(stage.all_reduces for stage in self.stages.values())
        for stage in self.stages.values():
            stage.all_gathers = stage.reduce_scatters = stage.all_reduces = 0.0
        return gathers, scatters, sums


def divide(
    modules: Mapping[StageKey, StageModule],
    sharding: Sharding | None,
    placement: tuple[tuple[int, ...], ...],
    undivided: Collection[str],
    groups: Mapping[str, dist.ProcessGroup],
    reduce_dtype: torch.dtype | None = None,
    train: TrainSpec | None = None,
) -> DeviceShards:
    """Divide a device's stages as the schedule says; their parameters become views of flat tensors.

    ``undivided``: names of parameters that stay whole, which others hold as well; ``reduce_dtype``: in which gradients
    are summed; None for their own; ``train``: says the optimizer, which may read whole matrices, and the arithmetic.
    """
    # torch before 2.10 has no gradients wider than their parameter.
    narrow = train is not None and train.gathers_narrow and hasattr(Tensor, "grad_dtype")
    if sharding is None:
        return DeviceShards({})
    result: dict[StageKey, ShardedStage] = {}
    members = shard_members(sharding, placement)
    for key, module in modules.items():
        member = members.get(key)
        if member is None or len(member.group) == 1:  # a group of one divides nothing
            continue
        stage = key[0]
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
    return DeviceShards(result)


# Save and load a sharded stage under the same keys as one that is not: a checkpoint knows nothing of shards.


def gathered_state(stage: ShardedStage, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor, Shard | None]]:
    """Gather ``param/<name>`` and ``optim/<name>/<key>`` of a stage, and distribute them over its members for writing.

    All members of the stage's shard group must call this. Each tensor is returned by one of them, in CPU memory, with
    how tensor ranks divide it; the weights and every kind of optimizer state go to another member, so that all of them
    write.
    """
    result: list[tuple[str, Tensor, Shard | None]] = []
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
                    result += [(f"optim/{name}/{key}", value.clone(), None) for name in flat.parameters]
                continue
            own = [p.detach() if not key else optimizer.state[p][key] for p in pieces]
            whole = _gather(torch.cat([part.reshape(-1) for part in own]), flat, writer)
            if whole is not None:
                for name, offset in flat.layout.offsets.items():
                    p = flat.parameters[name]
                    value_key = f"optim/{name}/{key}" if key else f"param/{name}"
                    result.append((value_key, whole[offset : offset + p.numel()].view(p.shape), stage.cuts.get(name)))
    return result


def _gather(shard: Tensor, flat: FlatWeights, writer: int) -> Tensor | None:
    shards = [torch.empty_like(shard) for _ in range(flat.group.size())] if flat.group.rank() == writer else None
    dist.gather(shard, shards, group=flat.group, group_dst=writer)
    return torch.cat(shards).cpu() if shards is not None else None


def read_shards(
    checkpoint: Checkpoint, stage: ShardedStage, optimizer: torch.optim.Optimizer, ranks: Mapping[Axis, int]
) -> None:
    """Load this member's shard of the weights and of the optimizer state, of a process with these ``ranks``.

    Raises:
        CheckpointError: a parameter is missing or has another shape, so the checkpoint is of another model.
    """
    for flat in stage.flats:
        tensors = checkpoint.read({f"param/{part.name}" for part in flat.parts if part.name is not None})
        for part, piece in zip(flat.parts, flat.pieces, strict=True):
            if part.name is not None:
                saved, cut = tensors[f"param/{part.name}"], stage.cuts.get(part.name)
                check_shape(checkpoint, f"param/{part.name}", saved, whole_shape(flat.parameters[part.name], cut))
                load_master(optimizer, piece, _part_of(own_part(saved, cut, ranks), part, piece))
        _read_optimizer(checkpoint, stage, flat, optimizer, ranks)


def whole_shape(parameter: Tensor, shard: Shard | None) -> tuple[int, ...]:
    """Return the shape of a parameter of which a process has this share; None for all."""
    return tuple(parameter.shape) if shard is None else shard.whole_shape(parameter.shape)


def own_part(whole: Tensor, shard: Shard | None, ranks: Mapping[Axis, int]) -> Tensor:
    """Return the share of a tensor that a process with these ranks has."""
    return whole if shard is None else shard.cut(whole, ranks.get(shard.axis, 0))


def _part_of(whole: Tensor, part: FlatPart, piece: Tensor) -> Tensor:
    return whole.reshape(-1)[part.begin : part.begin + part.size].view(piece.shape)


def check_shape(checkpoint: Checkpoint, key: str, saved: Tensor, whole: tuple[int, ...]) -> None:
    """Check that a tensor of a checkpoint has the shape of the model's.

    Raises:
        CheckpointError: it has another.
    """
    if tuple(saved.shape) != whole:
        raise CheckpointError(
            str(checkpoint.path),
            f"{key} has shape {tuple(saved.shape)}, but the model's has {whole}",
            "resume with the job that wrote it",
        )


def _read_optimizer(
    checkpoint: Checkpoint,
    stage: ShardedStage,
    flat: FlatWeights,
    optimizer: torch.optim.Optimizer,
    ranks: Mapping[Axis, int],
) -> None:
    fields, first = _state_fields(checkpoint, flat), next(iter(flat.parameters))
    names = {part.name for part in flat.parts if part.name is not None} | {first}
    tensors = checkpoint.read({f"optim/{name}/{field}" for name in names for field in fields})
    for part, piece in zip(flat.parts, flat.pieces, strict=True):
        state: dict[str, Tensor] = {}
        name = part.name or first
        cut = stage.cuts.get(name)
        for field in fields:
            saved = tensors[f"optim/{name}/{field}"]
            # torch counts updates in "step", whose shape is also that of a parameter without dimensions.
            if field == "step" or tuple(saved.shape) != whole_shape(flat.parameters[name], cut):
                state[field] = saved.clone().to(piece.device)
            elif part.name is None:
                state[field] = torch.zeros_like(updated_tensor(optimizer, piece))
            else:
                state[field] = _part_of(own_part(saved, cut, ranks), part, piece).clone().to(piece.device)
        if state:
            optimizer.state[updated_tensor(optimizer, piece)] = state


def _state_fields(checkpoint: Checkpoint, flat: FlatWeights) -> list[str]:
    """Return the optimizer's fields in the checkpoint; empty if it was written before the first update."""
    prefix = f"optim/{next(iter(flat.parameters))}/"
    return sorted(key.removeprefix(prefix) for key in checkpoint.keys if key.startswith(prefix))
