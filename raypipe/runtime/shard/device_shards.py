"""All sharded stages of a device, and the groups that divide them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist

from raypipe.runtime.shard.sharded_stage import ShardedStage
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.collective import Push
from raypipe.runtime.update.gradients import StageKey, TiedHolders
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import ShardMember, shard_members

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
    tied: tuple[TiedHolders, ...],
    groups: Mapping[str, dist.ProcessGroup],
    reduce_dtype: torch.dtype | None = None,
) -> DeviceShards:
    """Divide a device's stages as the schedule says; their parameters become views of flat tensors.

    ``reduce_dtype``: in which gradients are summed; None for their own.
    """
    if sharding is None:
        return DeviceShards({})
    undivided = {name for tie in tied for name in tie.parameters if len(tie.ranks) > 1}
    found: dict[StageKey, ShardedStage] = {}
    members = shard_members(sharding, placement)
    for key, module in modules.items():
        member = members.get(key)
        if member is None or len(member.group) == 1:  # a group of one divides nothing
            continue
        stage = key[0]
        found[key] = ShardedStage(
            module,
            stage,
            sharding.levels[stage],
            groups[dividing_group(stage, member)],
            groups.get(same_shard_group(stage, member)),
            undivided,
            counts=placement[0][stage] in member.group,
            reduce_dtype=reduce_dtype,
        )
    return DeviceShards(found)
