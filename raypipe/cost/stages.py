"""From a profile and a cut to the cost table that the simulator reads: stages, links, gradient sums, updates."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from raypipe.cost.collectives import Layout, collective_seconds
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sizes import stage_times
from raypipe.errors import SpecError
from raypipe.job.field_types import WIDTH, WireDtype
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import recomputed_pairs

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
    together: int = 1,
    recomputed: Collection[int] | None = None,
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
        together: micro-batches that run as one forward (2 in forward doubling): larger kernels, one overhead.
        again: layers that an R computes again; all of its stage by default.

    Raises:
        SpecError: the cut does not hold every layer once, or a placement for another number of stages.
    """
    check_cut(profile, cut, placement)
    placed = Placed.of(placement, copies, profile.devices_per_host)
    samples = microbatch * size
    stages = [[profile.layers[i] for i in layers] for layers in cut]
    share = crowding(profile, placed.busy)
    times = [stage_times(layers, samples, share) for layers in stages]
    extra = profile.task_overhead_s
    ahead = times if together == 1 else [stage_times(layers, samples * together, share) for layers in stages]
    forward = [(t.forward + extra) / together for t in ahead]
    weight = [t.weight_grad + extra for t in times]
    inputs = [t.input_grad + extra for t in times]
    if not split:
        # One task, one overhead. Only the sum of the two is ever used then; each keeps its share of it.
        scale = [(t.joint + extra) / (b + w) if b + w else 1.0 for t, b, w in zip(times, inputs, weight, strict=True)]
        inputs = [b * k for b, k in zip(inputs, scale, strict=True)]
        weight = [w * k for w, k in zip(weight, scale, strict=True)]
    remade = times
    if recomputed is not None:
        remade = [stage_times([profile.layers[i] for i in layers if i in recomputed], samples, share) for layers in cut]
    tied = tied_seconds(profile, cut, placed)
    last = len(cut) - 1
    return CostTable(
        forward=tuple(t / size for t in forward),
        input_grad=tuple(t / size for t in inputs),
        weight_grad=tuple(t / size for t in weight),
        recompute=tuple((t.recompute + extra) / size for t in remade),
        all_reduce=_all_reduces(profile, cut, placed),
        # The sum over tied copies runs after all others and before the updates; both ends wait for it.
        update=tuple(
            profile.update_s_per_parameter * parameters(profile, layers) + (tied if s in (0, last) else 0.0)
            for s, layers in enumerate(cut)
        ),
        comm=_messages(profile, cut, placed, samples) if last else 0.0,
    )


def crowding(profile: Profile, busy: int) -> float:
    """Time of a task while ``busy`` devices of its host are at work, over its time in the profile, which is all's.

    They share caches and the way to memory. One alone was measured too; between the two it is taken to be a line.
    """
    others = profile.devices_per_host - 1
    return profile.alone + (1 - profile.alone) * (min(busy - 1, others) / others) if others else 1.0


def costs_of(
    profile: Profile,
    cut: Cut,
    microbatch: int,
    schedule: Schedule,
    copies: int = 1,
    recomputed: Collection[int] | None = None,
) -> CostTable:
    """``stage_costs`` with placement, size, split and together read off a schedule."""
    split = any(task.kind == "W" for task in schedule.tasks())
    remade = recomputed_pairs(schedule)
    if recomputed is not None:  # where a stage keeps some layers, its micro-batches run one by one
        remade = {(s, mb) for s, mb in remade if all(i in recomputed for i in cut[s])}
    # The runtime runs the micro-batches of a forward together where it keeps nothing of them.
    runs = [len(t.mbs) for t in schedule.tasks() if t.kind == "F" and all((t.stage, mb) in remade for mb in t.mbs)]
    return stage_costs(
        profile, cut, microbatch, schedule.placement, copies=copies, size=float(schedule.size), split=split,
        together=max(runs, default=1), recomputed=recomputed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """Data-parallel copies of a placement side by side, numbered as ``passes.replicate`` does.

    Thousands of copies cost no more than a few: where copies begin on a host repeats after a few of them.
    """

    rows: tuple[tuple[int, ...], ...]
    """Of the first copy: per replica, the device of each stage."""
    copies: int
    width: int
    """Devices of a copy."""
    per_host: int
    """Devices of a host."""

    @staticmethod
    def of(rows: Sequence[Sequence[int]], copies: int, per_host: int) -> Placed:
        """From the first copy's placement."""
        return Placed(tuple(map(tuple, rows)), copies, 1 + max(d for row in rows for d in row), per_host)

    @property
    def turn(self) -> int:
        """Copies after which a copy begins at the same place of a host again."""
        return self.per_host // gcd(self.width, self.per_host)

    def layout(self, devices: Collection[int]) -> Layout:
        """Where these devices of every copy are.

        >>> Placed.of([(0, 1, 2)], 5, 2).layout([0])
        Layout(hosts=5, per_host=1)
        >>> Placed.of([(0, 1)], 8, 8).layout([0])
        Layout(hosts=2, per_host=4)
        """
        if self.per_host == 1:
            return Layout(self.copies * len(set(devices)), 1)
        turns, rest = divmod(self.copies, self.turn)
        parts = [self._layout(devices, self.turn)] * bool(turns) + [self._layout(devices, rest)] * bool(rest)
        hosts = sum(n * part.hosts for n, part in zip((turns, 1) if turns else (1,), parts, strict=False))
        return Layout(hosts, max(part.per_host for part in parts))

    def _layout(self, devices: Collection[int], copies: int) -> Layout:
        return Layout.of([copy * self.width + d for copy in range(copies) for d in devices], self.per_host)

    def first_rows(self) -> Iterator[tuple[int, ...]]:
        """Rows of the copies before the places on hosts repeat."""
        for copy in range(min(self.copies, self.turn)):
            for row in self.rows:
                yield tuple(copy * self.width + d for d in row)

    @property
    def busy(self) -> int:
        """Devices at work on a host."""
        return min(self.per_host, self.copies * len({d for row in self.rows for d in row}))


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


def _all_reduces(profile: Profile, cut: Cut, placed: Placed) -> tuple[float, ...]:
    """Per stage, the sum of its own gradients over its holders; tied ones are summed apart."""
    width, known = gradient_width(profile.dtype), dict[tuple[int, frozenset[int]], float]()
    found = []
    for stage, layers in enumerate(cut):
        own = parameters(profile, layers)
        if profile.tied_parameters and {0, len(profile.layers) - 1} & set(layers):
            own -= profile.tied_parameters
        holders = frozenset(row[stage] for row in placed.rows)
        # Which devices of a copy they are matters only where a host has several.
        key = own, holders if placed.per_host > 1 else frozenset(range(len(holders)))
        if key not in known:
            known[key] = group_seconds(profile, own * width, holders, placed)
        found.append(known[key])
    return tuple(found)


def tied_seconds(profile: Profile, cut: Cut, placed: Placed) -> float:
    """Sum of the gradients of a matrix that first and last layer share, over every device that holds either."""
    if not profile.tied_parameters:
        return 0.0
    holders = {row[stage] for row in placed.rows for stage in (0, len(cut) - 1)}
    return group_seconds(profile, profile.tied_parameters * gradient_width(profile.dtype), holders, placed)


def group_seconds(profile: Profile, size_bytes: float, holders: Collection[int], placed: Placed) -> float:
    """All-reduce over some devices of every copy, while the groups of all other devices of their hosts are at work."""
    layout = placed.layout(holders)
    sharing = max(1, placed.busy // max(1, layout.per_host))
    return collective_seconds(profile, "all_reduce", size_bytes, layout, sharing)


def _messages(profile: Profile, cut: Cut, placed: Placed, samples: float) -> tuple[float, ...]:
    """Latency of the link behind each stage but the last: of its slowest replica's."""
    host = placed.per_host
    seen: list[set[bool]] = [set() for _ in range(len(cut) - 1)]
    """Per link, whether it stays inside a host."""
    for row in placed.first_rows():
        for found, (a, b) in zip(seen, pairwise(row), strict=True):
            if a != b:
                found.add(a // host == b // host)
    return tuple(
        max(
            ((profile.inside if same else profile.between).seconds(profile.layers[part[-1]].sent_bytes * samples)
             for same in found), default=0.0,
        )
        for part, found in zip(cut, seen, strict=False)
    )  # fmt: skip


def with_cast_messages(profile: Profile, wire_dtype: WireDtype | None) -> Profile:
    """The profile of a job that casts its messages (``parallel.wire_dtype``): layers send less, and keep the same."""
    if wire_dtype is None:
        return profile
    share = 1 - min(1.0, WIDTH[wire_dtype] / gradient_width(profile.dtype))

    def one(layer: LayerProfile) -> LayerProfile:
        floats = layer.output_bytes if layer.output_floats is None else layer.output_floats
        return layer.model_copy(update={"message_bytes": layer.output_bytes - share * floats})

    return profile.model_copy(update={"layers": tuple(map(one, profile.layers))})
