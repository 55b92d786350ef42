"""Candidates: every way to run a job on so many devices that makes sense, enumerated lazily.

What a family allows is asked of the family itself, by making its smallest schedule (``form_of``); there is no second
list of rules here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.predict.form import Form, form_of
from raypipe.schedule import SCHEDULES
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import MOST, Concat

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
FEW = 4
"""Up to here every number of chunks is tried; above, only some (see ``chunk_counts``)."""


class Grid(NamedTuple):
    """How many devices do what: ``stages * replicas * tensor`` devices, ``microbatch`` samples a micro-batch."""

    stages: int
    """Devices along a pipeline, D; with ``tensor``, groups of devices."""
    replicas: int
    """Data-parallel copies, W."""
    microbatch: int
    """Samples of a micro-batch, B."""
    microbatches: int
    """Micro-batches of a step on one data-parallel copy, N."""
    tensor: int = 1
    """Devices that share each layer, T."""
    sub_pipelined: bool = False
    """Each micro-batch in two halves, of which one computes while the other's sums are under way."""

    def candidate(self, schedule: str, **options: Any) -> Candidate:
        """A schedule on these devices; ``options`` are further fields of ``Candidate``.

        A group of devices waits for the global norm: that is all the runtime knows there (docs/guides/tensor.md).
        """
        update = "wait" if self.tensor > 1 else "auto"
        return Candidate(
            schedule, self.stages, self.replicas, self.microbatch, self.microbatches, tensor=self.tensor,
            sub_pipelined=self.sub_pipelined, **{"update": update, **options},
        )  # fmt: skip


class Candidate(NamedTuple):
    """One plan that may be run; fields as in ``ParallelSpec``."""

    schedule: str
    stages: int
    replicas: int
    microbatch: int
    microbatches: int
    """Of one data-parallel copy."""
    chunks: int = 1
    unit: int | None = None
    pipelines: int = 2
    concat: Concat = "direct"
    recompute: Recompute = "none"
    sync: Sync = "lazy"
    memory_limit: float | None = None
    """Activations a device may hold, for families that can be told."""
    placement: str = "line"
    """Where a searched order's stages are; see ``auto.placements``."""
    update: RequestedNormPolicy = "auto"
    """What updates do about the global norm, where the job clips."""
    tensor: int = 1
    sub_pipelined: bool = False

    @property
    def groups(self) -> int:
        """What the schedule calls devices: each is ``tensor`` of them."""
        return self.stages * self.replicas

    @property
    def devices(self) -> int:
        """Of the whole plan."""
        return self.groups * self.tensor

    @property
    def form(self) -> Form:
        """Placement and kinds of task.

        Raises:
            ScheduleError: the family has no such form.
        """
        found = form_of(self.schedule, self.stages, self.chunks, self.pipelines, self.concat)
        if isinstance(found, ScheduleError):
            raise found
        return found

    @property
    def grid(self) -> Grid:
        """Its devices and micro-batches."""
        return Grid(
            self.stages, self.replicas, self.microbatch, self.microbatches, self.tensor, self.sub_pipelined
        )  # fmt: skip

    def parallel(self, **changes: Any) -> ParallelSpec:
        """As a job's ``parallel`` keys."""
        values: dict[str, Any] = {
            "schedule": self.schedule, "stages": self.stages, "replicas": self.replicas,
            "microbatch": self.microbatch, "chunks": self.chunks, "unit": self.unit, "pipelines": self.pipelines,
            "concat": self.concat, "sync": self.sync, "memory_limit": self.memory_limit, "update": self.update,
            "placement": self.placement, "recompute": "full" if self.recompute in ("full", "microbatches") else "none",
            "tensor": self.tensor, "sub_pipelined": self.sub_pipelined,
        }  # fmt: skip
        return ParallelSpec(**{**values, **changes})

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Smaller is simpler: what decides between plans that take as long."""
        return (
            self.stages > 1, self.tensor > 1, self.sub_pipelined, self.recompute != "none", self.devices, self.stages,
            [*SCHEDULES, "auto"].index(self.schedule), self.chunks, self.pipelines, CONCATS.index(self.concat),
            SYNCS.index(self.sync), self.update != "auto", self.memory_limit is not None, -self.microbatch,
            self.unit or 0,
        )  # fmt: skip


PLAIN = (
    "it needs several devices", "it cuts the model", "devices share each layer", "micro-batches run in halves",
    "more stages", "several copies of the weights", "stale weights", "activations computed twice",
    "more stages a device", "backwards in two parts", "a searched order", "more devices",
)  # fmt: skip
"""What makes a plan less simple, the most weighty first."""


def plainness(c: Candidate, form: Form) -> tuple[int, ...]:
    """One number for each of ``PLAIN``; smaller is simpler: what decides between plans that take about as long."""
    return (
        c.devices > 1, c.stages > 1, c.tensor, c.sub_pipelined, c.stages, form.replicas, form.versions != "flush",
        c.recompute != "none" or bool(form.recomputes), form.stages // c.stages, not form.joint, c.schedule == "auto",
        c.devices,
    )  # fmt: skip


def least_plainness(grid: Grid) -> tuple[int, ...]:
    """No candidate of the grid is simpler."""
    devices = grid.stages * grid.replicas * grid.tensor
    several = (devices > 1, grid.stages > 1, grid.tensor, grid.sub_pipelined, grid.stages)
    return (*several, *[0] * (len(PLAIN) - len(several) - 1), devices)


@cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return tuple(sorted({*low, *(n // k for k in low)}))


def grids(
    devices: int, batch: int, most_stages: int, smallest: int, largest: int, tensor: int = 1,
    sub_pipelined: bool = False,
) -> Iterator[Grid]:  # fmt: skip
    """Every (D, W, B) with at most ``devices`` devices in all; one device and pure data parallelism among them.

    Args:
        devices: of the cluster, P.
        batch: mini-batch in samples; W * B divides it, so that every replica does the same. Steps longer than any
            schedule may be (``schedule.shape.MOST``) are left out.
        most_stages: deepest pipeline: the model's layers.
        smallest, largest: micro-batch sizes whose times are known.
        tensor: devices that share each layer; ``devices`` counts each of them.
        sub_pipelined: micro-batches run in halves, so they are even.
    """
    groups = devices // tensor
    for replicas in divisors(batch):
        if replicas > groups:
            break
        share = batch // replicas
        for microbatch in divisors(share):
            if smallest <= microbatch <= largest and not (sub_pipelined and microbatch % 2):
                deepest = min(groups // replicas, most_stages, MOST * microbatch // share)
                for stages in range(1, deepest + 1):
                    yield Grid(stages, replicas, microbatch, share // microbatch, tensor, sub_pipelined)


class Asked(NamedTuple):
    """What a job asks for: tried whether or not it is among what usually makes sense."""

    schedule: str | None = None
    """A family, even where its orders are those of another one."""

    chunks: int | None = None
    unit: int | None = None


NOTHING = Asked()


def chunk_counts(stages: int, layers: int, asked: int | None = None) -> list[int]:
    """Numbers of stages a device, V: all up to ``FEW``, then 6, 8, 12, 16, ... as far as the layers reach; or the one
    that is ``asked`` for.

    >>> chunk_counts(2, 40), chunk_counts(2, 40, asked=5)
    ([1, 2, 3, 4, 6, 8, 12, 16], [5])
    """
    most = layers // stages
    if asked is not None:
        return [asked] if asked <= most else []
    found = [v for v in range(1, FEW + 1) if v <= most]
    step = FEW
    while step <= most:
        found += [v for v in (step * 3 // 2, step * 2) if v <= most]
        step *= 2
    return found


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


def candidates(grid: Grid, most_stages: int, asked: Asked = NOTHING) -> Iterator[Candidate]:
    """The schedules that make sense on a grid, without recomputation, each once: lazy sync, no memory limit.

    Two families that make the same order of the same tasks (``dapple`` and ``1f1b``; ``bfs`` of one chunk and
    ``gpipe``) are one candidate, under the first one's name. On one device every schedule is the same: ``gpipe``
    stands for all... it would hold every activation, so ``1f1b`` does.
    """
    stages, microbatches = grid.stages, grid.microbatches
    if stages == 1:
        yield grid.candidate("1f1b")
        return
    for name, family in SCHEDULES.items():
        if asked.schedule not in (None, name):
            continue
        options = family.options
        chunks = chunk_counts(stages, most_stages, asked.chunks) if "chunks" in options else [family.fixed_chunks or 1]
        for v in chunks:
            for pipelines in pipeline_counts(stages) if "pipelines" in options else [2]:
                for concat in CONCATS if "concat" in options else CONCATS[:1]:
                    form = form_of(name, stages, v, pipelines, concat)
                    if isinstance(form, ScheduleError) or form.stages > most_stages:
                        continue
                    if form.alias != name and asked.schedule is None:
                        continue
                    if form.stages * microbatches > MOST:
                        continue
                    if grid.microbatch % (form.size.denominator * (1 + grid.sub_pipelined)):
                        continue
                    if grid.sub_pipelined and form.versions != "flush":  # both halves run on one version
                        continue
                    for unit in unit_sizes(stages, microbatches, asked.unit) if "unit" in options else [None]:
                        yield grid.candidate(name, chunks=v, unit=unit, pipelines=pipelines, concat=concat)
