"""From a profile and a cut to the cost table that the simulator reads: stages, links, gradient sums, updates."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.cost.collectives import Layout, collective_seconds
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import stage_times
from raypipe.errors import SpecError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule

Cut = Sequence[Sequence[int]]
"""Per stage, the layers it holds."""


def gradient_width(dtype: str) -> int:
    """Bytes of a gradient's value: as wide as the weights, which stay float32 under 16-bit autocast."""
    return 8 if dtype == "float64" else 4


def stage_costs(
    profile: Profile,
    cut: Cut,
    microbatch: int,
    placement: Sequence[Sequence[int]],
    *,
    copies: int = 1,
    size: float = 1.0,
    split: bool = False,
) -> CostTable:
    """Seconds of every kind of task of every stage, for one full micro-batch.

    Args:
        profile: costs of the layers and links.
        cut: layers of each stage, each layer exactly once.
        microbatch: samples of a full micro-batch.
        placement: device of each stage, per replica. Devices are numbered host by host.
        copies: how often that placement stands side by side, each time on devices of its own. Gradients are summed
            over all devices that hold a stage.
        size: share of a micro-batch that one id stands for (1/2 in backward halving): smaller kernels, less efficient.
        split: the schedule has B and W apart; else BW is charged what a joint backward costs.

    Raises:
        SpecError: the cut does not hold every layer once, or a placement for another number of stages.
    """
    check_cut(profile, cut, placement)
    placement = side_by_side(placement, copies)
    samples = microbatch * size
    times = [stage_times([profile.layers[i] for i in layers], samples) for layers in cut]
    extra = profile.task_overhead_s
    forward = [t.forward + extra for t in times]
    weight = [t.weight_grad + extra for t in times]
    inputs = [t.input_grad + extra for t in times]
    if not split:
        # One task, one overhead. Only the sum of the two is ever used then; each keeps its share of it.
        scale = [(t.joint + extra) / (b + w) if b + w else 1.0 for t, b, w in zip(times, inputs, weight, strict=True)]
        inputs = [b * k for b, k in zip(inputs, scale, strict=True)]
        weight = [w * k for w, k in zip(weight, scale, strict=True)]
    tied = tied_seconds(profile, cut, placement)
    last = len(cut) - 1
    return CostTable(
        forward=tuple(t / size for t in forward),
        input_grad=tuple(t / size for t in inputs),
        weight_grad=tuple(t / size for t in weight),
        recompute=tuple((t.recompute + extra) / size for t in times),
        all_reduce=tuple(_all_reduce(profile, cut, placement, s) for s in range(len(cut))),
        # The sum over tied copies runs after all others and before the updates; both ends wait for it.
        update=tuple(
            profile.update_s_per_parameter * parameters(profile, layers) + (tied if s in (0, last) else 0.0)
            for s, layers in enumerate(cut)
        ),
        comm=tuple(_message(profile, cut, placement, s, samples) for s in range(last)) if last else 0.0,
    )


def costs_of(profile: Profile, cut: Cut, microbatch: int, schedule: Schedule) -> CostTable:
    """``stage_costs`` with placement, size and split read off a schedule."""
    split = any(task.kind == "W" for task in schedule.tasks())
    return stage_costs(profile, cut, microbatch, schedule.placement, size=float(schedule.size), split=split)


def side_by_side(placement: Sequence[Sequence[int]], copies: int) -> Sequence[Sequence[int]]:
    """The placement of all data-parallel copies, numbered as ``passes.replicate`` does.

    >>> side_by_side([(0, 1)], 2)
    [(0, 1), (2, 3)]
    """
    if copies == 1:
        return placement
    width = 1 + max(device for row in placement for device in row)
    return [tuple(copy * width + device for device in row) for copy in range(copies) for row in placement]


def check_cut(profile: Profile, cut: Cut, placement: Sequence[Sequence[int]]) -> None:
    """Refuse a cut that is not one of this model, or a placement that is not one of this cut."""
    count = len(profile.layers)
    if [i for layers in cut for i in layers] != list(range(count)) or not all(len(layers) for layers in cut):
        raise SpecError(
            "cut", f"is no cut of {count} layers into stages", f"give each of 0 to {count - 1} once, in order"
        )
    for row in placement:
        if len(row) != len(cut):
            raise SpecError("placement", f"{len(row)} stages for a cut into {len(cut)}", "make them agree")


def parameters(profile: Profile, layers: Sequence[int]) -> int:
    """Values that a stage of these layers holds and updates; a matrix that two of them share counts once.

    Copies of a tied matrix on two stages are updated on both alike.
    """
    both_ends = {0, len(profile.layers) - 1} <= set(layers)
    return sum(profile.layers[i].parameters for i in layers) - (profile.tied_parameters if both_ends else 0)


def _all_reduce(profile: Profile, cut: Cut, placement: Sequence[Sequence[int]], stage: int) -> float:
    """Sum of a stage's own gradients over its holders; tied ones are summed apart."""
    holders = {row[stage] for row in placement}
    own = parameters(profile, cut[stage])
    ends = {0, len(profile.layers) - 1} & set(cut[stage])
    if profile.tied_parameters and ends:
        own -= profile.tied_parameters
    return group_seconds(profile, own * gradient_width(profile.dtype), sorted(holders), placement)


def tied_seconds(profile: Profile, cut: Cut, placement: Sequence[Sequence[int]]) -> float:
    """Sum of the gradients of a matrix that first and last layer share, over every device that holds either."""
    if not profile.tied_parameters:
        return 0.0
    holders = {row[stage] for row in placement for stage in (0, len(cut) - 1)}
    return group_seconds(profile, profile.tied_parameters * gradient_width(profile.dtype), sorted(holders), placement)


def group_seconds(
    profile: Profile, size_bytes: float, holders: Sequence[int], placement: Sequence[Sequence[int]]
) -> float:
    """All-reduce over some devices while the groups of all other devices of their hosts are at work too."""
    layout = Layout.of(holders, profile.devices_per_host)
    busy = _busy(placement, profile.devices_per_host)
    sharing = max(1, busy // max(1, layout.per_host))
    return collective_seconds(profile, "all_reduce", size_bytes, layout, sharing)


def _busy(placement: Sequence[Sequence[int]], most: int) -> int:
    """Devices of a placement, counted no further than ``most``."""
    seen: set[int] = set()
    for row in placement:
        seen.update(row)
        if len(seen) >= most:
            return most
    return len(seen)


def _message(profile: Profile, cut: Cut, placement: Sequence[Sequence[int]], stage: int, samples: float) -> float:
    """Latency of the link behind a stage: of its slowest replica's."""
    size_bytes = profile.layers[cut[stage][-1]].output_bytes * samples
    host = profile.devices_per_host
    pairs = {(row[stage] // host == row[stage + 1] // host) for row in placement if row[stage] != row[stage + 1]}
    return max(((profile.inside if same else profile.between).seconds(size_bytes) for same in pairs), default=0.0)
