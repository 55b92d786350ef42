"""Candidates: every way to run a job on so many devices that makes sense, enumerated lazily.

What a family allows is asked of the family itself, by making its smallest schedule (``form_of``); there is no second
list of rules here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from raypipe.cost.profile import Profile
from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import GatherKey, ParallelSpec, Shard, zero_level
from raypipe.job.spec import JobSpec
from raypipe.plan.cut.layers import Balance
from raypipe.plan.predict.form import Form, form_of
from raypipe.schedule import SCHEDULES
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import MOST, NEUTRAL, OPTIONS, Concat, Grid, Innermost, ParallelShape

Recompute = Literal["none", "full", "microbatches", "layers"]
"""What a plan recomputes while it waits for the gradient; a job's ``parallel.recompute`` takes the same words.
``full``: all activations. ``microbatches``: all but those of as many micro-batches of each stage as its device's memory
holds. ``layers``: in every micro-batch, all but those of as many of each stage's first layers as memory holds, which is
finer where few micro-batches are in flight."""
Ways = tuple[Recompute, ...]
"""Ways to recompute that a plan may take if it does not fit without."""
PARTLY: Ways = ("microbatches", "layers")
SYNCS: tuple[Sync, ...] = ("lazy", "eager-opt", "eager")
"""Placements of gradient sums, from the simplest."""
CONCATS: tuple[Concat, ...] = ("direct", "doubling", "halving")
GATHERS: tuple[GatherKey, ...] = ("unit", "microbatch", "step", "order")
"""Which tasks share a gather, from the simplest; the first is what a job has that says nothing of it."""
FEW = 4
"""Up to here every number of chunks is tried; above, only some (see ``chunk_counts``)."""


@dataclass(frozen=True, kw_only=True)
class Candidate(ParallelShape):
    """One plan that may be run: a shape, and what the planner decides about it; fields as in ``ParallelSpec``."""

    recompute: Recompute = "none"
    sync: Sync = "lazy"
    placement: str = "line"
    """Where a searched order's stages are; see ``search.placements``."""
    update: RequestedNormPolicy = "auto"
    """What updates do about the global norm, where the job clips."""
    balance: Balance | Literal["memory"] = "stages"
    """What the cut of the model balances. ``memory``: stages, each within its device's memory, where devices differ."""
    shard: Shard = "none"
    """What data-parallel copies divide."""
    gather: GatherKey = "unit"
    """With shards: which tasks share a gather; ``order``: positions that were searched (``plan.searched_gathers``)."""
    shard_replicas: int | None = None
    """With shards: consecutive copies that divide a stage; None: all."""
    innermost: Innermost = "stages"
    """Which devices are neighbours."""

    @classmethod
    def on(cls, grid: Grid, schedule: str, **more: Any) -> Candidate:
        """The schedule on these devices; ``more`` are further fields.

        Devices that share layers or experts wait for the global norm: that is all the runtime knows there
        (docs/guides/tensor.md, docs/guides/experts.md).
        """
        shared = max(grid.tensor, grid.experts, grid.context) > 1
        return super().on(grid, schedule, **{"update": "wait" if shared else "auto", **more})

    @property
    def form(self) -> Form:
        """Placement and kinds of task.

        Raises:
            ScheduleError: the family has no such form.
        """
        result = form_of(self)
        if isinstance(result, ScheduleError):
            raise result
        return result

    @property
    def level(self) -> int:
        """ZeRO level, 0 to 3."""
        return zero_level(self.shard)

    @property
    def shard_group(self) -> int:
        """Copies that divide a stage."""
        return 1 if self.shard == "none" else self.shard_replicas or self.replicas

    @property
    def one_stage_each(self) -> bool:
        """Return whether every device of a copy holds one stage.

        Raises:
            ScheduleError: the family has no such form.
        """
        return self.form.placement == (tuple(range(self.stages)),)

    def sized(self, microbatch: int, microbatches: int) -> Candidate:
        """With micro-batches of another size, and so another number of them; a unit takes no more than there are."""
        unit = None if self.unit is None else min(self.unit, microbatches)
        return replace(self, microbatch=microbatch, microbatches=microbatches, unit=unit)

    def parallel(self, **changes: Any) -> ParallelSpec:
        """As a job's ``parallel`` keys."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("microbatches", "balance")}
        values["recompute"] = "full" if self.recompute in ("full", "microbatches") else "none"
        return ParallelSpec(**{**values, **changes})

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Smaller is simpler: what decides between plans that take as long."""
        return (
            self.stages > 1,
            self.tensor > 1,
            self.experts > 1,
            self.context > 1,
            self.sub_pipelined,
            self.recompute != "none",
            self.devices,
            self.stages,
            [*SCHEDULES, "auto"].index(self.schedule),
            self.chunks,
            self.pipelines,
            CONCATS.index(self.concat),
            self.slices,
            self.vocabulary != "whole",
            SYNCS.index(self.sync),
            self.update != "auto",
            self.memory_limit is not None,
            -self.microbatch,
            self.unit or 0,
            self.balance != "stages",
            self.level,
            GATHERS.index(self.gather),
            -self.shard_group,
            self.innermost != "stages",
        )


PLAIN = (
    "it needs several devices",
    "it cuts the model",
    "devices share each layer",
    "copies divide experts",
    "copies divide sequences",
    "micro-batches run in halves",
    "more stages",
    "several copies of the weights",
    "stale weights",
    "replicas divide their state",
    "micro-batches run in slices",
    "devices divide the head",
    "activations computed twice",
    "more stages a device",
    "backwards in two parts",
    "a searched order",
    "more devices",
)
"""What makes a plan less simple, the most weighty first."""


def plainness(c: Candidate, form: Form) -> tuple[int, ...]:
    """One number for each of ``PLAIN``; smaller is simpler: what decides between plans that take about as long."""
    return (
        c.devices > 1,
        c.stages > 1,
        c.tensor,
        c.experts,
        c.context,
        c.sub_pipelined,
        c.stages,
        form.replicas,
        form.versions != "flush",
        c.level,
        c.slices > 1,
        c.vocabulary != "whole",
        c.recompute != "none" or bool(form.recomputes),
        form.stages // c.stages,
        not form.joint,
        c.schedule == "auto",
        c.devices,
    )


def least_plainness(grid: Grid) -> tuple[int, ...]:
    """No candidate of the grid is simpler."""
    shared = (grid.tensor, grid.experts, grid.context, grid.sub_pipelined)
    several = (grid.devices > 1, grid.stages > 1, *shared, grid.stages)
    return (*several, *[0] * (len(PLAIN) - len(several) - 1), grid.devices)


@cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return tuple(sorted({*low, *(n // k for k in low)}))


def ways_to_recompute(wish: object, greedy: bool) -> Ways:
    """How plans may recompute: as the job says, and by the greedy rule all or nothing."""
    if wish == "none":
        return ()
    if greedy or wish == "full":
        return ("full",)
    return tuple(way for way in PARTLY if wish in (None, "auto", way))


def grids(
    devices: int,
    batch: int,
    most_stages: int,
    smallest: int,
    largest: int,
    tensor: int = 1,
    sub_pipelined: bool = False,
    experts: int = 1,
    context: int = 1,
    sequence_parallel: bool = False,
) -> Iterator[Grid]:
    """Every (D, W, B) with at most ``devices`` devices in all; one device and pure data parallelism among them.

    Args:
        devices: of the cluster, P.
        batch: mini-batch in samples; W * B divides it, so that every replica does the same. Steps longer than any
            schedule may be (``schedule.shape.MOST``) are left out.
        most_stages: deepest pipeline: the model's layers.
        smallest, largest: micro-batch sizes whose times are known.
        tensor: devices that share each layer; ``devices`` counts each of them.
        sub_pipelined: micro-batches run in halves, so they are even.
        experts: copies that divide experts; all of them do, in groups of so many.
        context: the same of sequences; ``batch`` is divided over such groups.
        sequence_parallel: see ``Grid``.
    """
    groups = devices // tensor
    shared = (tensor, sub_pipelined, experts, context, sequence_parallel)
    for apart in divisors(batch):
        replicas = apart * context
        if replicas > groups:
            break
        if replicas % experts:
            continue
        share = batch // apart
        for microbatch in divisors(share):
            if smallest <= microbatch <= largest and not (sub_pipelined and microbatch % 2):
                deepest = min(groups // replicas, most_stages, MOST * microbatch // share)
                for stages in range(1, deepest + 1):
                    yield Grid(stages, replicas, microbatch, share // microbatch, *shared)


Asked = Mapping[str, Any]
"""A ``schedule`` and options that a job asks for: tried whether or not they are among what usually makes sense, the
schedule even where its orders are those of another family."""
NOTHING: Asked = MappingProxyType({})


def chunk_counts(stages: int, layers: int, asked: int | None = None) -> list[int]:
    """Numbers of stages a device, V: all up to ``FEW``, then 6, 8, 12, 16, ... as far as the layers reach; or the one
    that is ``asked`` for.

    >>> chunk_counts(2, 40), chunk_counts(2, 40, asked=5)
    ([1, 2, 3, 4, 6, 8, 12, 16], [5])
    """
    most = layers // stages
    if asked is not None:
        return [asked] if asked <= most else []
    result = [v for v in range(1, FEW + 1) if v <= most]
    step = FEW
    while step <= most:
        result += [v for v in (step * 3 // 2, step * 2) if v <= most]
        step *= 2
    return result


LEAST_SLICE = 1024
"""Positions of a slice: the planner tries no shorter ones, whose kernels would be small."""
MOST_SLICES = 32


def slice_counts(job: JobSpec, profile: Profile) -> tuple[int, ...]:
    """Numbers of slices that the planner may try: powers of two for a model that is known to run in slices."""
    if profile.slicing is None or slices_refused(job, profile) is not None:
        return ()
    positions, least = profile.slicing.positions, max(LEAST_SLICE, profile.slicing.shortest)
    fit = (2**n for n in range(1, MOST_SLICES.bit_length()))
    return tuple(k for k in fit if positions % k == 0 and positions // k >= least)


def context_counts(job: JobSpec, profile: Profile, devices: int) -> tuple[int, ...]:
    """Numbers of copies that may divide sequences, where nothing else fits: powers of two, of long enough chunks."""
    if profile.slicing is None or slices_refused(job, profile) is not None:
        return ()
    positions, least = profile.slicing.positions, max(LEAST_SLICE, profile.slicing.shortest)
    fit = (2**n for n in range(1, devices.bit_length()))
    return tuple(n for n in fit if n <= devices and not positions % (2 * n) and positions // (2 * n) >= least)


def slices_refused(job: JobSpec, profile: Profile) -> str | None:
    """Why no plan runs micro-batches in slices, as a clause, of a job whose sequences are long enough to try that."""
    slicing, train = profile.slicing, job.train
    if slicing is None or slicing.positions < 2 * LEAST_SLICE:
        return None
    if train.compile != "none":
        return f"compiled stages (compile: {train.compile}) run whole micro-batches"
    if train.metrics is not None:
        return "train.metrics wants a micro-batch's predictions whole"
    return slicing.refused_slices or None


def in_slices(c: Candidate, counts: Sequence[int]) -> Iterator[Candidate]:
    """The candidate with more slices, in ascending order of them.

    One stage alone holds a whole micro-batch whatever its slices, and the runtime cannot combine them with all.
    """
    alone = c.stages == 1 or max(c.tensor, c.context) > 1 or c.recompute not in ("none", "full")
    if not alone and "slices" in SCHEDULES[c.schedule].options:
        yield from (replace(c, slices=k) for k in counts if k > c.slices)


def unit_sizes(stages: int, microbatches: int, asked: int | None = None) -> list[int]:
    """Sizes of a scheduling unit, U: all micro-batches, their divisors from D up, and ZeroPP's 2D-1 and 2D; or the one
    that is ``asked`` for."""
    if asked is not None:
        return [asked] if asked <= microbatches else []
    sizes = {microbatches, 2 * stages - 1, 2 * stages, *(u for u in divisors(microbatches) if u >= stages)}
    return sorted(u for u in sizes if u <= microbatches)


def pipeline_counts(stages: int) -> list[int]:
    """Directed pipelines of a bidirectional schedule, 2f; the family refuses those that do not fit."""
    return [2 * f for f in divisors(max(1, stages // 2))]


def _tried(option: str, grid: Grid, layers: int, asked: Asked) -> Sequence[Any]:
    """Values of a family's option that make sense on a grid; an option without a rule here has one, its default."""
    wish = asked.get(option)
    if option == "chunks":
        return chunk_counts(grid.stages, layers, wish)
    if option == "unit":
        return unit_sizes(grid.stages, grid.microbatches, wish)
    if wish is not None:
        return [wish]
    if option == "pipelines":
        return pipeline_counts(grid.stages)
    return CONCATS if option == "concat" else [NEUTRAL[option]]


def candidates(grid: Grid, most_stages: int, asked: Asked = NOTHING) -> Iterator[Candidate]:
    """The schedules that make sense on a grid, without recomputation, each once: lazy sync, no memory limit.

    Two families that make the same order of the same tasks (``dapple`` and ``1f1b``; ``bfs`` of one chunk and
    ``gpipe``) are one candidate, under the first one's name. On one device every schedule is the same: ``gpipe``
    stands for all... it would hold every activation, so ``1f1b`` does.
    """
    if grid.stages == 1:
        yield Candidate.on(grid, "1f1b")
        return
    named = asked.get("schedule")
    for name, family in SCHEDULES.items():
        if named != name and (named is not None or family.paired):
            continue
        own = [option for option in OPTIONS if option in family.options]
        fixed = {"chunks": family.fixed_chunks} if family.fixed_chunks else {}
        for values in itertools.product(*(_tried(option, grid, most_stages, asked) for option in own)):
            c = Candidate.on(grid, name, **fixed, **dict(zip(own, values, strict=True)))
            form = form_of(c)
            if isinstance(form, ScheduleError) or form.stages > most_stages:
                continue
            if form.alias != name and named is None:
                continue
            if form.stages * grid.microbatches > MOST:
                continue
            if grid.microbatch % (form.share_of_samples.denominator * (1 + grid.sub_pipelined)):
                continue
            if max(grid.tensor, grid.context) > 1 and form.slices > 1:  # the runtime cannot combine them
                continue
            if grid.sub_pipelined and form.versions != "flush":  # both halves run on one version
                continue
            yield c
