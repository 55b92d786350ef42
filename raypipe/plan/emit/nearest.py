"""The nearest layouts that a trainer can express to a plan, and what is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raypipe.errors import RequestError, ScheduleError
from raypipe.job.parallel_spec import JOBS_OWN, SAME_AS, ParallelSpec, Shard
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.plan.emit.layout import TrainerLayout, layer_by_layer
from raypipe.plan.predict.prediction import Cut
from raypipe.schedule.forms.text import to_torch_csv
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import SHARDED
from raypipe.schedule.shape import NEUTRAL, Innermost

Shards = Mapping[Shard, Shard]
"""What copies divide in a plan -> what they may divide in a trainer."""
DEFAULTS = ParallelSpec()
DIVIDED = {"experts": "experts", "sequences": "context"}
"""What consecutive copies divide, and its key."""
LAYERWISE = {"zero2": "sums gradients layer by layer", "zero3": "gathers weights layer by layer"}
"""What trainers do without a pipeline, by what copies divide."""
MOST_TASKS = 60_000
"""Longer steps are not tried with other micro-batches."""


@dataclass(frozen=True)
class Choices:
    """Cuts and micro-batches to choose from where a plan's own order is not expressible."""

    cut: Callable[[int, int], Cut]
    """The best cut between blocks into so many stages, for micro-batches of a size."""
    sizes: tuple[int, ...]
    """Micro-batches whose times are known."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """The layouts that a trainer can express."""

    title: str
    schedules: tuple[str, ...]
    """Of ``SCHEDULES``, for pipelines."""
    orders: bool = False
    """It reads an order of its own, in PyTorch's CSV."""
    shards: Shards
    """Of copies of the whole model."""
    pipelined_shards: Shards
    """Of copies of a pipeline, or with tensor parallelism."""
    shard_groups: tuple[Shard, ...] = ()
    """Where fewer than all copies may divide a stage."""
    innermost: tuple[Innermost, ...] = ("replicas",)
    """Its numberings of devices, the first where nothing else is asked for."""
    lazy: tuple[Shard, ...]
    """Where it sums gradients after the last backward, else during it."""
    eager: tuple[Shard, ...]
    """Where it can sum them during it."""
    eager_pipelines: bool = False
    """In pipelines too."""
    full_pipelines: bool = False
    """A pipeline needs as many micro-batches as devices."""
    experts: Literal["copies", "shards"] | None = None
    """Which copies may divide experts: any, or those that divide the other parameters of a stage among them."""
    context: Literal["copies", "shards"] | None = None
    """The same, of sequences."""
    sequence: bool | None = None
    """Whether positions between divided layers are divided too; None: as its file says."""
    some_layers: bool = False
    """It can recompute the first blocks of each stage alone."""


@dataclass
class Draft:
    """A layout on its way to what a trainer can express."""

    layout: TrainerLayout
    lost: list[str] = field(default_factory=list)

    def set(self, why: str, **keys: Any) -> None:
        """Change ``parallel`` keys, and say so where the plan has others."""
        parallel = self.layout.parallel
        changed = {key: value for key, value in keys.items() if getattr(parallel, key) != value}
        if changed:
            self.lost += [
                f"{key}: {_word(getattr(parallel, key))} becomes {_word(changed[key])}: {why}" for key in changed
            ]
            self.silently(**changed)

    def silently(self, **keys: Any) -> None:
        """Change ``parallel`` keys that decide nothing here."""
        self.layout = self.layout.with_keys(**keys)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} layers"
    return "none" if value is None else str(value)


def nearest(layout: TrainerLayout, able: Abilities, choices: Choices) -> list[Draft]:
    """Return the layouts nearest to a plan's that a trainer can express, each with what it loses.

    Raises:
        RequestError: the plan has what the trainer has nothing like: stale weights, too few micro-batches, experts,
            more devices than blocks.
    """
    draft = Draft(layout)
    title, parallel = able.title, layout.parallel
    if parallel.vocabulary == "split":
        draft.layout = replace(layout, cut=choices.cut(parallel.stages, parallel.microbatch))
        draft.set(f"{title} has the whole head on the last device", vocabulary="whole")
        layout, parallel = draft.layout, draft.layout.parallel
    if layout.plan().one_copy().versions != "flush":
        raise RequestError("--emit", f"{parallel.schedule} trains on stale weights, {title} does not", "plan without")
    for what, name in DIVIDED.items():
        if getattr(parallel, name) > 1 and getattr(able, name) is None:
            raise RequestError("--emit", f"{title} does not divide {what} over copies", f"plan with {name}: 1")
    if able.full_pipelines and layout.microbatches < parallel.stages:
        why = f"{title} wants a micro-batch for each of {parallel.stages} devices, the plan has {layout.microbatches}"
        raise RequestError("--emit", why, "give fewer stages or smaller micro-batches")
    if parallel.gather == "order" and layout.order is not None:
        bare = replace(layout.order.without(SHARDED), sharding=None)
        draft.layout = replace(layout, order=bare if parallel.schedule == "auto" else None)
    draft.set(f"{title} runs whole micro-batches", slices=1, sub_pipelined=False)
    if able.sequence is not None and parallel.tensor > 1:
        how = "always" if able.sequence else "never"
        draft.set(f"{title} {how} divides positions between layers", sequence_parallel=able.sequence)
    draft.set(f"{title} holds experts in ascending order", expert_order=())
    draft.set("a key of this job alone", **{key: getattr(DEFAULTS, key) for key in JOBS_OWN})
    draft.set(f"{title} keeps all or recomputes blocks", activation_memory_budget=1.0)
    draft.silently(update="wait", auto=False, tensor_table=None, first_k=None, side_stream=None, memory_cap_mb=None)
    beside = parallel.context > 1 and parallel.innermost == "stages" and layout.pipelined
    if beside and "stages" in able.innermost:
        draft.set(f"{title} numbers copies that divide sequences next to each other", innermost="replicas")
    elif parallel.innermost not in able.innermost and layout.pipelined and parallel.replicas > 1:
        draft.set(f"{title} numbers copies next to each other", innermost=able.innermost[0])
    elif not layout.pipelined or parallel.replicas == 1:
        draft.silently(innermost=able.innermost[0])
    if not layout.aligned and layout.pipelined:
        if len(layout.cut) <= layout.units:  # else each of the orders below has fewer stages
            draft.layout = replace(draft.layout, cut=choices.cut(len(layout.cut), parallel.microbatch))
        draft.lost.append(f"cut: stages end inside blocks, and {title} cuts between them")
    _shard(draft, able)
    result = list(_scheduled(draft, able, choices))
    if not result:
        why = f"{title} has no order for {parallel.stages} devices and {layout.units - 2} blocks"
        raise RequestError("--emit", why, "give the planner fewer stages or smaller micro-batches")
    for one in result:
        _recompute(one, able)
    return result


def _shard(draft: Draft, able: Abilities) -> None:
    """Reduce what copies divide, and when gradients are summed."""
    parallel = draft.layout.parallel
    whole = not draft.layout.pipelined and parallel.tensor == 1
    shard = "none" if parallel.replicas == 1 else parallel.shard
    divided = "none" if parallel.replicas == 1 else (able.shards if whole else able.pipelined_shards)[shard]
    here = "" if whole else " in a pipeline or tensor group"
    among = [(what, name) for what, name in DIVIDED.items() if getattr(able, name) == "shards"]
    among = [one for one in among if getattr(parallel, one[1]) > 1]
    for what, name in among:
        if divided in ("none", "zero1"):
            few = parallel.context if name == "context" and parallel.context < parallel.replicas else None
            why = f"{able.title} divides {what} over copies that divide the rest too"
            draft.set(why, shard="zero2", shard_replicas=few if shard == "none" else parallel.shard_replicas)
            parallel, shard, divided = draft.layout.parallel, "zero2", "zero2"
    draft.set(f"{able.title} divides {divided}, not {shard},{here} over data-parallel copies", shard=divided)
    for what, name in among:
        if (parallel.shard_replicas or 0) % getattr(parallel, name):
            draft.set(f"{able.title} divides {what} over copies that divide the rest too", shard_replicas=None)
    if divided == "none":
        draft.silently(shard_replicas=None)
    elif divided not in able.shard_groups:
        draft.set(f"{able.title} divides over all copies", shard_replicas=None)
    gather = "microbatch" if divided == "zero3" else "unit"
    if shard == divided == "zero3" and parallel.gather != gather and draft.layout.microbatches > 1:
        draft.set(f"{able.title} gathers weights for every micro-batch", gather=gather)
    draft.silently(gather=gather)
    sync = parallel.sync
    eager = able.eager if whole or able.eager_pipelines else ()
    if parallel.replicas == 1:
        draft.silently(sync="lazy")
    elif sync != "lazy" and divided not in eager:
        draft.set(f"{able.title} sums gradients after the last backward", sync="lazy")
    elif sync == "lazy" and divided not in able.lazy and eager:
        draft.silently(sync="eager")  # no later, and so no loss
    elif sync not in ("lazy", "eager"):
        draft.silently(sync="eager")


def _scheduled(draft: Draft, able: Abilities, choices: Choices) -> Iterator[Draft]:
    """Yield the order of tasks: the plan's where the trainer has it, else each of the nearest that it has."""
    layout = draft.layout
    parallel, cut = layout.parallel, layout.cut
    name, devices = SAME_AS.get(parallel.schedule, parallel.schedule), parallel.stages
    neutral = {**NEUTRAL, "placement": "line"}
    if not layout.pipelined:
        draft.silently(**neutral)
        draft.layout = layer_by_layer(draft.layout)
        if draft.layout.cut != cut:
            how = LAYERWISE.get(parallel.shard, "has one stage here")
            draft.lost.append(f"chunks: {len(cut)} becomes {len(draft.layout.cut)}: {able.title} {how}")
        yield draft
        return
    plain = parallel.slices == 1 and parallel.memory_limit is None
    plain = plain and (layout.microbatches >= devices or not able.orders)  # PyTorch's own have a micro-batch a device
    if name in able.schedules and layout.order is None and plain and layout.aligned:
        draft.silently(**neutral | {"chunks": parallel.chunks, "schedule": name})
        yield draft
        return
    exported = _exported(layout) if able.orders and layout.aligned else None
    if exported is not None:
        order, placement = exported
        chunks = order.stages // devices
        draft.silently(**neutral | {"schedule": "auto", "placement": placement, "chunks": chunks})
        draft.layout = replace(draft.layout, order=replace(order, name="auto"))
        yield draft
        return
    order = layout.own_order
    if any(task.kind == "R" for task in order.tasks()) and parallel.recompute == "none":  # by its own schedule
        draft.set(f"as {name} recomputes by itself", recompute="full")
        layout = draft.layout
    lost = f"{able.title} has {', '.join(able.schedules)}"
    for chunks in dict.fromkeys((1, 2, len(cut) // devices)):
        stages = devices * chunks
        for size in choices.sizes:
            count, left = divmod(layout.batch // parallel.sample_copies, size)
            interleaved = chunks > 1
            left = left or layout.batch % parallel.sample_copies
            if left or stages > layout.units or 3 * stages * count > MOST_TASKS:
                continue
            if interleaved and (count % devices or "interleaved-1f1b" not in able.schedules):
                continue
            if able.full_pipelines and count < devices:
                continue
            own = cut if len(cut) == stages else choices.cut(stages, size)
            one = Draft(replace(layout, order=None, cut=own), list(draft.lost))
            one.silently(**neutral | {"chunks": chunks})
            one.set(lost, schedule="interleaved-1f1b" if interleaved else "1f1b")
            one.set("the schedule is another one", microbatch=size)
            yield one


def _exported(layout: TrainerLayout) -> tuple[Schedule, str] | None:
    """The order for ``torch.distributed.pipelining``, and how its stages lie: round after round, or in a V."""
    try:
        order = layout.own_order
        to_torch_csv(order)
    except ScheduleError:
        return None
    devices, place = order.devices, order.placement[0]
    if place == tuple(s % devices for s in range(order.stages)):
        return order, "line" if order.stages == devices else "ring"
    if place == (*range(devices), *reversed(range(devices))):
        return order, "v"
    return None


def _recompute(draft: Draft, able: Abilities) -> None:
    """Reduce which activations are computed again."""
    layout = draft.layout
    parallel = layout.parallel
    draft.silently(alphas=None)
    if parallel.keep is not None:
        draft.set(f"{able.title} recomputes all micro-batches alike", keep=None)
    if parallel.recompute in ("none", "full"):
        return
    again = layers_to_recompute(parallel, layout.cut) or frozenset()
    most = recomputed_blocks(layout, again)
    if not able.some_layers or most == layout.deepest:
        draft.set(f"{able.title} recomputes all blocks or none", recompute="full")
    elif not most:
        draft.set(f"{able.title} recomputes blocks alone", recompute="none")
    else:
        why = f"{able.title} recomputes as many of the first blocks of each stage"
        draft.set(why, recompute=first_blocks(layout, most))


def recomputed_blocks(layout: TrainerLayout, again: AbstractSet[int]) -> int:
    """Return the blocks that are recomputed, some layers of them at least, of the stage that recomputes most."""
    return max(sum(not again.isdisjoint(layout.layers_of(b)) for b in own) for own in layout.blocks)


def first_blocks(layout: TrainerLayout, count: int) -> tuple[int, ...]:
    """Return the layers of so many of the first blocks of each stage."""
    return tuple(sorted(i for own in layout.blocks for b in own[:count] for i in layout.layers_of(b)))
