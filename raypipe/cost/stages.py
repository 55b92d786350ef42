"""Compute the cost table that the simulator reads from a profile and a cut: stages, links, all-reduces and updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.experts import all_to_all_seconds, with_exchange, with_gathers
from raypipe.cost.hosts import Layout, Placed
from raypipe.cost.layer_work import newton_schulz_flops
from raypipe.cost.profile import LayerProfile, LinkFit, Profile
from raypipe.cost.sizes import times_of_stages
from raypipe.errors import SpecError
from raypipe.job.field_types import WEIGHT_WIDTH, WIDTH, ReduceDtype, WireDtype
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import message_dtype, reduce_dtype
from raypipe.job.train_spec import TrainSpec
from raypipe.schedule.costs import Comm, CostTable
from raypipe.schedule.families.vocabulary import graph_of
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import recomputed_pairs
from raypipe.schedule.shape import Innermost
from raypipe.schedule.sharding import whole_shards

Cut = Sequence[Sequence[int]]
"""Per stage, the layers it holds."""


def gradient_width(dtype: str) -> int:
    """Return the bytes of a gradient value: as wide as the weights, which stay float32 under 16-bit autocast."""
    return WEIGHT_WIDTH[dtype]


def reduced_width(profile: Profile) -> int:
    """Return the bytes of a gradient value while it is summed over replicas."""
    return gradient_width(profile.dtype) if profile.reduce_dtype is None else WIDTH[profile.reduce_dtype]


def with_reduce_dtype(profile: Profile, dtype: ReduceDtype | None) -> Profile:
    """The profile of a job that sums gradients in another dtype than their own (``parallel.reduce_dtype``)."""
    return profile.each_kind(lambda kind: kind.model_copy(update={"reduce_dtype": dtype}))


def stage_costs(
    profile: Profile,
    cut: Cut,
    microbatch: int,
    placement: Sequence[Sequence[int]],
    *,
    copies: int = 1,
    innermost: Innermost = "stages",
    size: float = 1.0,
    slices: int = 1,
    split: bool = False,
    together: int = 1,
    recomputed: Collection[int] | None = None,
) -> CostTable:
    """Compute the seconds of every kind of task on every stage, for one full micro-batch.

    Args:
        profile: costs of the layers and links.
        cut: layers of each stage, each layer exactly once.
        microbatch: samples of a full micro-batch.
        placement: device of each stage, per replica. Devices are numbered host by host.
        copies: data-parallel copies of the placement, each on its own devices. Gradients are all-reduced over all
            devices that hold a stage.
        innermost: which devices are neighbours (``cost.hosts.Numbering``).
        size: share of a micro-batch that one id stands for (1/2 in backward halving); kernels are then smaller and
            less efficient.
        slices: slices of a micro-batch along the sequence, each an id; ``size`` is then 1 / ``slices``.
        split: whether the schedule has separate B and W; otherwise BW costs a joint backward.
        together: micro-batches per forward (2 in forward doubling); kernels are then larger, with one overhead.
        recomputed: layers that R recomputes; by default all layers of its stage.

    Raises:
        SpecError: the cut does not hold every layer once, or the placement has another number of stages.
    """
    check_cut(profile, cut, placement)
    placed = Placed.of(placement, copies, profile.placed, innermost)
    way = _Way(microbatch * size * slices, size, slices, split, together, recomputed)
    holders = [placed.kinds((stage,)) for stage in range(len(cut))]
    kinds = profile.kinds
    tables = {kind: _table(kinds[kind], cut, placed, way) for kind in sorted(set().union(*holders))}
    table = next(iter(tables.values())) if len(tables) == 1 else _slowest(tables, holders)
    if not profile.trained_tied:
        return table
    # Tied gradients are all-reduced after all others and before the updates; the first and last stage wait for it.
    last = len(cut) - 1
    tied = max(tied_seconds(kinds[kind], cut, placed) for kind in holders[0] | holders[last])
    return replace(table, update=tuple(u + (tied if s in (0, last) else 0.0) for s, u in enumerate(table.update)))


class _Way(NamedTuple):
    """How a schedule runs a micro-batch; see ``stage_costs``."""

    samples: float
    """That one id runs on."""
    size: float
    slices: int
    split: bool
    together: int
    recomputed: Collection[int] | None


def _slowest(tables: Mapping[int, CostTable], holders: Sequence[Collection[int]]) -> CostTable:
    """Return the costs of stages by the slowest kind of device that holds each.

    A message goes over the slower of its two ends' links.

    Args:
        tables: per kind, the costs if all devices were of that kind.
        holders: per stage, the kinds of the devices that hold it.
    """

    def worst(values: Mapping[int, Sequence[float]], stage: int, also: Collection[int] = ()) -> float:
        return max(values[kind][stage] for kind in {*holders[stage], *also})

    names = (
        "forward",
        "input_grad",
        "weight_grad",
        "recompute",
        "all_reduce",
        "update",
        "attention",
        "attention_grad",
    )
    by_name = {name: {kind: getattr(table, name) for kind, table in tables.items()} for name in names}
    links = {kind: table.links for kind, table in tables.items()}
    stages = range(len(holders))
    times: dict[str, Any] = {name: tuple(worst(values, s) for s in stages) for name, values in by_name.items()}
    comm = next(iter(tables.values())).comm
    if isinstance(comm, Mapping):
        return CostTable(**times, comm={edge: max(t.latency(*edge) for t in tables.values()) for edge in comm})
    return CostTable(
        **times,
        comm=tuple(worst(links, s, holders[s + 1]) for s in stages[:-1]) or 0.0,
    )


def _table(profile: Profile, cut: Cut, placed: Placed, way: _Way) -> CostTable:
    """Return the costs of stages on devices of one kind, without the all-reduce of tied gradients."""
    samples, size, slices, split, together, recomputed = way
    stages = times_of_stages(profile.layers)
    frozen = frozen_stages(profile, cut)
    share = crowding(profile, placed.busy)
    times = [stages.times(layers, samples, share, slices) for layers in cut]
    extra = profile.task_overhead_s
    ahead = times if together == 1 else [stages.times(layers, samples * together, share) for layers in cut]
    forward = [(t.forward + extra) / together for t in ahead]
    weight = [0.0 if s in frozen else t.weight_grad + extra for s, t in enumerate(times)]  # no such task there
    inputs = [t.input_grad + extra for t in times]
    if not split:
        # A joint backward is one task with one overhead. Only the sum of B and W is used then; split it in proportion.
        scale = [(t.joint + extra) / (b + w) if b + w else 1.0 for t, b, w in zip(times, inputs, weight, strict=True)]
        inputs = [b * k for b, k in zip(inputs, scale, strict=True)]
        weight = [w * k for w, k in zip(weight, scale, strict=True)]
    first = next((s for s in range(len(cut)) if s not in frozen), 0)
    growing = [stages.attention(layers, samples, share, slices) for layers in cut]
    recompute = times
    if recomputed is not None:
        recompute = [stages.times([i for i in layers if i in recomputed], samples, share, slices) for layers in cut]
    table = CostTable(
        forward=tuple(t / size for t in forward),
        input_grad=tuple(0.0 if s < first else t / size for s, t in enumerate(inputs)),
        weight_grad=tuple(t / size for t in weight),
        recompute=tuple((t.recompute + extra) / size for t in recompute),
        attention=tuple(min(f, a / size) for f, (a, _) in zip((t / size for t in forward), growing, strict=True)),
        attention_grad=tuple(
            0.0 if s < first else min(b / size, g / size)
            for s, (b, (_, g)) in enumerate(zip(inputs, growing, strict=True))
        ),
        all_reduce=_all_reduces(profile, cut, placed),
        update=tuple(
            profile.update_s_per_parameter * trained_parameters(profile, layers) + iteration_seconds(profile, layers)
            for layers in cut
        ),
        comm=_messages(profile, cut, placed, samples / slices) if len(cut) > 1 else 0.0,
    )
    travel = [seconds / size for seconds in _exchanges(profile, cut, placed, samples / slices)]
    return with_exchange(table, travel) if profile.context == 1 else with_gathers(table, travel, profile.exchanges)


def iteration_seconds(profile: Profile, layers: Sequence[int]) -> float:
    """Return the seconds of an update's iterations on the matrices of a stage, where they are counted apart."""
    if profile.iteration_flops_s is None:
        return 0.0
    return sum(newton_schulz_flops(*m) for i in layers for m in profile.layers[i].matrices) / profile.iteration_flops_s


def matrix_values(profile: Profile, layers: Sequence[int]) -> int:
    """Return the values of the matrices of a stage that an update iterates on."""
    return sum(rows * columns for i in layers for rows, columns in profile.layers[i].matrices)


class WholeMatrices(NamedTuple):
    """Matrices of a stage that copies divide whole: what a shard has more than its part."""

    padding: int
    """Values by which the shards of all copies together are larger than what they hold: each is as large as the largest
    one."""
    share: float
    """Share of the iterations that the copy with the most has."""


def whole_matrices(profile: Profile, layers: Sequence[int], copies: int) -> WholeMatrices:
    """Return what so many copies have of the matrices of a stage (``schedule.sharding.whole_shards``)."""
    return _whole_matrices(tuple(m for i in layers for m in profile.layers[i].matrices), copies)


@lru_cache(maxsize=1024)
def _whole_matrices(matrices: tuple[tuple[int, int], ...], copies: int) -> WholeMatrices:
    if not matrices:
        return WholeMatrices(0, 1 / copies)
    costs, sizes = [newton_schulz_flops(*m) for m in matrices], [rows * columns for rows, columns in matrices]
    shards = whole_shards(costs, copies)
    largest = max(sum(sizes[i] for i in shard) for shard in shards)
    busiest = max(sum(costs[i] for i in shard) for shard in shards)
    return WholeMatrices(copies * largest - sum(sizes), busiest / sum(costs))


def _exchanges(profile: Profile, cut: Cut, placed: Placed, samples: float) -> list[float]:
    """Per stage, seconds of one exchange of each of its layers (``exchanged_bytes``), over the copies that have one."""
    if profile.exchanging == 1:
        return [0.0] * len(cut)
    group = replace(placed, copies=profile.exchanging)
    result = []
    for stage, layers in enumerate(cut):
        sizes = Counter(size for i in layers if (size := profile.layers[i].exchanged_bytes))
        layouts = {group.layout({row[stage]}) for row in placed.rows} if sizes else set[Layout]()
        result.append(
            max(
                (
                    sum(
                        count * all_to_all_seconds(profile, size * samples, layout, placed.sharing(layout))
                        for size, count in sizes.items()
                    )
                    for layout in layouts
                ),
                default=0.0,
            )
        )
    return result


def split_seconds(profile: Profile, layers: Sequence[int], samples: float, busy: int) -> tuple[float, float, float]:
    """Return the seconds of F, B and W of a stage of these layers, in ``stage_costs`` of one kind of device.

    Args:
        profile: of that kind.
        layers: of the stage, one of which is trained.
        samples: of a micro-batch.
        busy: devices of a host that are at work.
    """
    t = times_of_stages(profile.layers).times(layers, samples, crowding(profile, busy))
    extra = profile.task_overhead_s
    return t.forward + extra, t.input_grad + extra, t.weight_grad + extra


def message_seconds(
    profile: Profile, devices: int, copies: int, innermost: Innermost, samples: float
) -> list[list[list[float]]]:
    """Return the seconds, in ``stage_costs``, of a message from one device of a copy to another, after each layer.

    ``message_seconds(...)[a][b][i]`` is what comes from a stage on a that ends with layer i to the next one on b.
    """
    pairs = [(a, b) for a in range(devices) for b in range(devices)]
    placed = Placed.of([[d for pair in pairs for d in pair]], copies, profile.placed, innermost)
    alone = Placed.of([range(devices)], copies, profile.placed, innermost)
    result: list[list[list[float]]] = [[] for _ in range(devices)]
    for (a, b), users in zip(pairs, placed.crossings()[::2], strict=True):
        ends = [profile.kinds[kind] for kind in alone.kinds((a, b))]
        slowest = [0.0] * len(profile.layers)
        for link, kind in ((_link(kind, n), kind) for kind in ends for n in users):
            seconds = [link.seconds(layer.sent_bytes * samples) for layer in kind.layers]
            slowest = [max(pair) for pair in zip(slowest, seconds, strict=True)]
        result[a].append(slowest)
    return result


def crowding(profile: Profile, busy: int) -> float:
    """Return a task's time with ``busy`` devices of its host at work, over its profiled time with all at work.

    Devices of a host share caches and memory bandwidth. The profile measured one device alone and all together; in
    between, the time is interpolated linearly.
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
    innermost: Innermost = "stages",
) -> CostTable:
    """Call ``stage_costs`` with placement, size, split and together taken from a schedule."""
    split = any(task.kind == "W" for task in schedule.tasks())
    pairs = recomputed_pairs(schedule)
    if recomputed is not None:  # a stage that keeps some layers runs its micro-batches one by one
        pairs = {(s, mb) for s, mb in pairs if all(i in recomputed for i in cut[s])}
    # The runtime runs the micro-batches of a forward together only if it keeps none of their activations.
    runs = [len(t.mbs) for t in schedule.tasks() if t.kind == "F" and all((t.stage, mb) in pairs for mb in t.mbs)]
    return stage_costs(
        profile,
        cut,
        microbatch,
        schedule.placement,
        copies=copies,
        size=float(schedule.size),
        slices=schedule.rules.slices,
        split=split,
        together=max(runs, default=1),
        recomputed=recomputed,
        innermost=innermost,
    )


def check_cut(profile: Profile, cut: Cut, placement: Sequence[Sequence[int]]) -> None:
    """Check that the cut belongs to the profile's model and the placement to the cut.

    Raises:
        SpecError: the cut does not hold every layer once, or the placement has another number of stages.
    """
    count = len(profile.layers)
    if [i for layers in cut for i in layers] != list(range(count)) or not all(len(layers) for layers in cut):
        raise SpecError(
            "cut", f"does not divide {count} layers into stages", f"give each of 0 to {count - 1} once, in order"
        )
    for row in placement:
        if len(row) != len(cut):
            raise SpecError("placement", f"has {len(row)} stages, the cut {len(cut)}", "make them agree")


def parameters(profile: Profile, layers: Sequence[int]) -> int:
    """Return the number of parameter values that a stage of these layers holds, trained or not.

    A matrix that two of the layers share counts once.
    """
    tied = profile.tied_parameters if _both_ends(profile, layers) else 0
    return sum(profile.layers[i].parameters for i in layers) - tied


def trained_parameters(profile: Profile, layers: Sequence[int]) -> int:
    """Return the number of parameter values that a stage of these layers updates.

    A matrix that two of the layers share counts once; if they are on two stages, each stage updates its own copy.
    """
    tied = profile.trained_tied if _both_ends(profile, layers) else 0
    return sum(map(times_of_stages(profile.layers).trained.__getitem__, layers)) - tied


def narrow_bytes(profile: Profile, layers: Sequence[int]) -> float:
    """Return the bytes of a stage's weights that copies gather in 16 bits, where they divide them (ZeRO level 3).

    They are those that autocast would cast, which experts are not. A matrix that two layers share is gathered as it is.
    """
    if not profile.gathers_narrow:
        return 0.0
    tied, last, each = profile.trained_tied, len(profile.layers) - 1, WIDTH["bfloat16"]

    def of(i: int) -> float:
        layer = profile.layers[i]
        aside = tied if i == last else 0
        trained = layer.trained - layer.expert_parameters - aside
        return max(0.0, min(layer.cast_bytes - each * aside, each * trained))

    return sum(map(of, layers))


def frozen_stages(profile: Profile, cut: Cut) -> tuple[int, ...]:
    """Return the stages of a cut that have no trained parameter, as a schedule's rules name them.

    None are, if no layer has one: the profile then knows nothing of what is trained.
    """
    result = tuple(s for s, layers in enumerate(cut) if not trained_parameters(profile, layers))
    return result if len(result) < len(cut) else ()


def _both_ends(profile: Profile, layers: Sequence[int]) -> bool:
    return 0 in layers and len(profile.layers) - 1 in layers


def _all_reduces(profile: Profile, cut: Cut, placed: Placed) -> tuple[float, ...]:
    """Per stage, seconds of the all-reduce of its gradients over its holders, without tied gradients."""
    width, known = reduced_width(profile), dict[tuple[int, frozenset[int]], float]()
    result = []
    for stage, layers in enumerate(cut):
        own = trained_parameters(profile, layers)
        if {0, len(profile.layers) - 1} & set(layers):
            own -= profile.trained_tied
        if not own:
            result.append(0.0)  # no collective is made
            continue
        holders = frozenset(row[stage] for row in placed.rows)
        # The position of the holders in a copy matters only if hosts have several devices.
        key = own, frozenset(range(len(holders))) if placed.one_per_host else holders
        experts = expert_parameters(profile, layers)
        if key not in known:
            known[key] = group_seconds(profile, (own - experts) * width, holders, placed)
            if experts:  # fewer copies hold the same ones
                known[key] += group_seconds(profile, experts * width, holders, placed.same_experts(profile.experts))
        result.append(known[key])
    return tuple(result)


def expert_parameters(profile: Profile, layers: Sequence[int]) -> int:
    """Return the number of trained parameter values of a stage that belong to experts which copies divide; 0 if they
    divide none."""
    if profile.experts == 1:
        return 0
    return sum(profile.layers[i].expert_parameters for i in layers)


def tied_seconds(profile: Profile, cut: Cut, placed: Placed) -> float:
    """Return the seconds of the all-reduce of tied gradients over every device with the first or the last layer."""
    if not profile.trained_tied:
        return 0.0
    holders = {row[stage] for row in placed.rows for stage in (0, len(cut) - 1)}
    return group_seconds(profile, profile.trained_tied * reduced_width(profile), holders, placed)


def group_seconds(profile: Profile, size_bytes: float, holders: Collection[int], placed: Placed) -> float:
    """Return the seconds of an all-reduce over some devices of every copy, while the hosts' other devices do theirs."""
    layout = placed.layout(holders)
    sharing = placed.sharing(layout)
    return collective_seconds(profile, "all_reduce", size_bytes, layout, sharing)


def _messages(profile: Profile, cut: Cut, placed: Placed, samples: float) -> Comm:
    """Seconds of a message from each stage but the last to the next, over its slowest replica's link."""
    if profile.shares > 1:
        return _messages_of_shares(profile, cut, placed, samples)
    return tuple(
        max(
            (_link(profile, users).seconds(profile.layers[part[-1]].sent_bytes * samples) for users in result),
            default=0.0,
        )
        for part, result in zip(cut, placed.crossings(), strict=False)
    )


def _messages_of_shares(profile: Profile, cut: Cut, placed: Placed, samples: float) -> Comm:
    """Seconds of a message along each edge of a head that is divided; what all shares read is sent to one after the
    other."""
    last, edges = profile.shares - 1, graph_of(profile.shares).edges
    ends = tuple(tuple(row[s] for edge in edges for s in edge) for row in placed.rows)
    result = {}
    for (a, b), crossed in zip(edges, replace(placed, rows=ends).crossings()[::2], strict=True):
        size = profile.layers[cut[a][-1]].sent_bytes * samples
        once = max((_link(profile, users).seconds(size) for users in crossed), default=0.0)
        result[a, b] = once * (last if a == last else 1)
    return result


def _link(profile: Profile, users: int) -> LinkFit:
    """Return the link of a message inside a host (0), or between hosts, where so many share a host's links."""
    return profile.between.shared(users / profile.host_links) if users else profile.inside


def as_job_runs(profile: Profile, train: TrainSpec, parallel: ParallelSpec) -> Profile:
    """Return the profile with messages, gradient sums and gathered weights in the dtypes that a job asks for, and with
    rows of packed documents as long as they are on average."""
    cast = with_mean_rows(with_cast_messages(profile, message_dtype(train, parallel)), train)
    summed = with_reduce_dtype(cast, reduce_dtype(train, parallel))
    narrow = {"gathers_narrow": train.gathers_narrow}
    return summed.each_kind(lambda kind: kind.model_copy(update=narrow)) if train.gathers_narrow else summed


def with_mean_rows(profile: Profile, train: TrainSpec) -> Profile:
    """Return the profile with the times and messages of a mean row, where documents are packed into rows.

    Rows are profiled full. They need room for any documents, and are padded to the length of those that they get: to a
    little over half of it. Memory stays that of full rows.
    """
    tokens, row = train.tokens_per_step, train.microbatch_tokens
    if tokens is None or row == "auto":
        return profile
    share = min(1.0, tokens / (train.batch * row))

    def one(layer: LayerProfile) -> LayerProfile:
        sent = {"message_bytes": share * layer.sent_bytes, "exchanged_bytes": share * layer.exchanged_bytes}
        times = {size: of.scaled(share) for size, of in layer.times.items()}
        return layer.model_copy(update={"times": times, **sent})

    return profile.each_kind(lambda kind: kind.model_copy(update={"layers": tuple(map(one, kind.layers))}))


def with_cast_messages(profile: Profile, wire_dtype: WireDtype | None) -> Profile:
    """The profile of a job that casts its messages (``parallel.wire_dtype``): layers send less, and keep the same."""
    if wire_dtype is None:
        return profile
    share = 1 - min(1.0, WIDTH[wire_dtype] / gradient_width(profile.dtype))

    def one(layer: LayerProfile) -> LayerProfile:
        floats = layer.output_bytes if layer.output_floats is None else layer.output_floats
        return layer.model_copy(update={"message_bytes": layer.output_bytes - share * floats})

    return profile.each_kind(lambda kind: kind.model_copy(update={"layers": tuple(map(one, kind.layers))}))
