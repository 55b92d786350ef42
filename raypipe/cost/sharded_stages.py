"""The collectives of sharded data parallelism in a cost table: gathers, reduce-scatters, and all-reduces of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import gcd

from raypipe.cost.collectives import Kind, collective_seconds
from raypipe.cost.hosts import Layout, Placed
from raypipe.cost.profile import Profile
from raypipe.cost.stages import (
    Cut,
    expert_parameters,
    gradient_width,
    group_seconds,
    iteration_seconds,
    narrow_bytes,
    reduced_width,
    trained_parameters,
    whole_matrices,
)
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Sharding
from raypipe.schedule.shape import Innermost
from raypipe.schedule.sharding import copies_of_experts


def shard_group(sharding: Sharding, copies: int) -> int:
    """Return the size of a shard group; ``copies`` are data-parallel copies of the schedule that has this sharding."""
    return sharding.group or sharding.copies * copies


def with_sharding(
    costs: CostTable,
    profile: Profile,
    cut: Cut,
    placement: Sequence[Sequence[int]],
    sharding: Sharding,
    copies: int,
    innermost: Innermost = "stages",
) -> CostTable:
    """Return the costs of a schedule's stages with what sharding makes of them.

    A gather or a reduce-scatter moves the trained weights or the gradients of a whole stage, over its shard group,
    gradients in the dtype of their sums; frozen weights are not divided. Those of experts that copies divide go over
    the members of the group with the same ones, one after the other. Of several groups, the one that lies on most hosts
    is costed. An AR of a sharded stage sums its shards over the groups that replicate them, and U updates a
    shard. Tied matrices are summed apart, whatever the level.

    Args:
        costs: of the same stages without sharding (``stage_costs``).
        profile: costs of the layers and links.
        cut: layers of each stage.
        placement: device of each stage, per replica of one copy.
        sharding: levels and shard groups.
        copies: data-parallel copies in all.
        innermost: which devices are neighbours (``cost.hosts.Numbering``).
    """
    group = sharding.group or copies
    width, reduced = gradient_width(profile.dtype), reduced_width(profile)
    placed = Placed.of(placement, copies, profile.placed, innermost)
    again = copies_of_experts(group, profile.experts)
    members = {1: replace(placed, copies=group)}  # of a shard group: all, and those with the same experts
    if again > 1:
        members[profile.experts] = members[1].same_experts(profile.experts)

    busy = placed.busy
    # The position in a copy matters only if hosts have several devices.
    devices = {0} if placed.one_per_host else {device for row in placed.rows for device in row}
    apart = min(copies // group, placed.turn // gcd(placed.turn, group))  # groups that may lie on hosts in other ways

    def layouts_of(device: int, every: int) -> set[Layout]:
        if apart <= 1:
            return {members[every].layout([device])}
        groups = (range(g * group, (g + 1) * group, every) for g in range(apart))
        return {Layout.of([placed.device(copy, device) for copy in some], placed.hosts) for some in groups}

    layouts = {(device, every): layouts_of(device, every) for device in devices for every in members}

    @cache
    def seconds(kind: Kind, size: float, layout: Layout) -> float:
        return collective_seconds(profile, kind, size, layout, max(1, busy // max(1, layout.per_host)))

    def over_group(kind: Kind, stage: int, size: float, every: int = 1) -> float:
        held = {0} if placed.one_per_host else {row[stage] for row in placed.rows}
        return max(seconds(kind, size, layout) for device in held for layout in layouts[device, every])

    everywhere = replace(placed, copies=copies // group, every=group)  # a shard's holder in each group

    def between_groups(stage: int, size: float) -> float:
        layout = everywhere.layout({row[stage] for row in placed.rows})
        return seconds("all_reduce", size, layout)

    gather, scatter = [0.0] * len(cut), [0.0] * len(cut)
    # Gathers and reduce-scatters run beside tasks of other stages and take some of the device's processors from them.
    # They are charged to the tasks of their own stage, of which they slow down no more than there is: a gather for the
    # forward, one for the backward, a sum.
    forward, inputs = list(costs.forward), list(costs.input_grad)
    taken = profile.communication_share
    all_reduce, update = list(costs.all_reduce), list(costs.update)
    for stage, layers in enumerate(cut):
        if sharding.levels[stage]:
            experts = expert_parameters(profile, layers)
            trained, whole = trained_parameters(profile, layers) - experts, whole_matrices(profile, layers, group)
            values = trained + whole.padding
            narrow = narrow_bytes(profile, layers) if sharding.levels[stage] == 3 else 0.0  # half of what they take
            gather[stage] = over_group("all_gather", stage, values * width - narrow)
            scatter[stage] = over_group("reduce_scatter", stage, values * reduced)
            if experts and again > 1:
                gather[stage] += over_group("all_gather", stage, experts * width, profile.experts)
                scatter[stage] += over_group("reduce_scatter", stage, experts * reduced, profile.experts)
            if sharding.levels[stage] == 3:
                forward[stage] += taken * min(forward[stage], gather[stage])
                back = inputs[stage] + costs.weight_grad[stage]
                inputs[stage] += taken * min(back, gather[stage] + scatter[stage])
            all_reduce[stage] = between_groups(stage, values * reduced / group)
            if experts and again > 1:
                all_reduce[stage] += between_groups(stage, experts * reduced / again)
            elif experts:
                holders = {row[stage] for row in placed.rows}
                all_reduce[stage] += group_seconds(
                    profile, experts * reduced, holders, placed.same_experts(profile.experts)
                )
            # Measured, an update has its iterations with it.
            share = 1 / group if profile.iteration_flops_s is not None else whole.share
            divided = trained * (1 - share) + experts * (1 - 1 / again)
            update[stage] -= profile.update_s_per_parameter * divided
            update[stage] -= iteration_seconds(profile, layers) * (1 - whole.share)
    return replace(
        costs,
        forward=tuple(forward),
        input_grad=tuple(inputs),
        gather=tuple(gather),
        reduce_scatter=tuple(scatter),
        all_reduce=tuple(all_reduce),
        update=tuple(max(0.0, u) for u in update),
    )
