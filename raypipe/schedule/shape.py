"""Shapes: how a training step is divided. Each key stands here once, and is handed on with its shape.

``ScheduleOptions``: what a schedule family may be told. ``Shape``: one pipeline, what a generator makes a schedule of.
``Grid``: devices and micro-batches of a whole job. ``ParallelShape``: a schedule on a grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeVar, get_args

from raypipe.errors import ScheduleError, check_known

Concat = Literal["direct", "doubling", "halving"]
Innermost = Literal["stages", "replicas"]
"""What follows one another as devices are numbered host by host."""
Vocabulary = Literal["whole", "split"]
"""Where the rows of the head's matrix are."""
MOST = 10_000_000
"""Stages times micro-batches: what is above would fill the memory of any machine, and is a typing error."""


def cli_option(metavar: str, help: str, *, order_only: bool = False) -> dict[str, Any]:
    """Return the metadata of a field: its name and its help on the command line.

    Args:
        metavar: what stands for its value on the command line.
        help: one line for ``--help``.
        order_only: it changes the order of tasks alone: neither where stages are nor which kinds of task there are.
    """
    return {"metavar": metavar, "help": help, "order_only": order_only}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of schedule families besides devices and micro-batches; ``parallel`` has the same keys.

    A default is neutral: what a family that has no use for the option must be given.
    """

    chunks: int = field(default=1, metadata=cli_option("V", "Stages per device [1]."))
    """Stages per device, V."""
    unit: int | None = field(default=None, metadata=cli_option("U", "Micro-batches a unit.", order_only=True))
    """Micro-batches of a scheduling unit, U (ZeroPP); none: all of them."""
    pipelines: int = field(default=2, metadata=cli_option("2F", "Pipelines, both directions [2]."))
    """Pipelines of a bidirectional schedule, 2f: f down and f up (Chimera)."""
    concat: Concat = field(default="direct", metadata=cli_option("HOW", "direct, doubling or halving."))
    """How basic units follow one another (Chimera section 3.3)."""
    memory_limit: float | None = field(
        default=None, metadata=cli_option("M", "Activations a device may hold at once.", order_only=True)
    )
    """Activations a device may hold at once, in units of one stage's for one micro-batch."""

    slices: int = field(default=1, metadata=cli_option("K", "Slices of a micro-batch along the sequence [1]."))
    """Slices that a micro-batch is cut into along the sequence, k; for causal models."""
    vocabulary: Vocabulary = field(default="whole", metadata=cli_option("HOW", "The head: whole or split [whole]."))
    """``split``: each device holds a share of the rows of the head's matrix, as a stage of its own
    (``families.vocabulary``)."""

    @property
    def options(self) -> dict[str, Any]:
        """The options alone, by name."""
        return {key: getattr(self, key) for key in OPTIONS}


NEUTRAL: dict[str, Any] = {f.name: f.default for f in fields(ScheduleOptions)}
"""Each option's default."""
OPTIONS = tuple(NEUTRAL)
"""Names of the options."""


@dataclass(frozen=True, kw_only=True)
class Shape(ScheduleOptions):
    """Devices, micro-batches and a family's own options. What a family cannot use must keep its default."""

    devices: int = field(metadata=cli_option("D", "Devices [4]."))
    """Devices of one pipeline, D."""
    microbatches: int = field(metadata=cli_option("N", "Micro-batches [8]."))
    """Full micro-batches of a step, N, over all replicas of the family's own (not data-parallel copies)."""

    def __post_init__(self) -> None:
        for name in ("devices", "microbatches", "chunks", "slices"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ScheduleError(name, f"{value!r} is not a count", "use a whole number >= 1")
        if (size := self.devices * self.chunks * self.microbatches * self.slices) > MOST:
            name = max(("devices", "microbatches", "chunks", "slices"), key=lambda n: int(getattr(self, n)))
            raise ScheduleError(
                name, f"{size} times a micro-batch on a stage, a step of more than {MOST}", "use smaller numbers"
            )
        if self.unit is not None and not 1 <= self.unit <= self.microbatches:
            raise ScheduleError(
                "unit", f"{self.unit} micro-batches a unit, {self.microbatches} in all", f"use 1 to {self.microbatches}"
            )
        if self.pipelines < 2 or self.pipelines % 2:
            raise ScheduleError("pipelines", f"{self.pipelines} is not 2f", "use an even number >= 2")
        check_known(ScheduleError, "concat", self.concat, get_args(Concat))
        check_known(ScheduleError, "vocabulary", self.vocabulary, get_args(Vocabulary))
        if self.memory_limit is not None and not 0 < self.memory_limit < float("inf"):
            fix = "use a finite number above 0; leave it out for no limit"
            raise ScheduleError("memory_limit", f"{self.memory_limit} activations", fix)


class HasOptions(Protocol):
    """Anything with ``stages`` and all of ``OPTIONS``: a ``ParallelShape``, or a job's ``parallel`` section."""

    @property
    def stages(self) -> int:
        """Devices along one pipeline."""


def pipeline_shape(of: HasOptions, microbatches: int) -> Shape:
    """The shape of one pipeline: its devices and options, for so many micro-batches.

    Raises:
        ScheduleError: an impossible one.
    """
    return Shape(devices=of.stages, microbatches=microbatches, **{key: getattr(of, key) for key in OPTIONS})


@dataclass(frozen=True)
class Grid:
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
    experts: int = 1
    """Data-parallel copies that divide the experts of each layer, E."""
    context: int = 1
    """Data-parallel copies that divide each sequence, C."""
    sequence_parallel: bool = False
    """With ``tensor``: devices that share layers divide the positions between these."""

    @property
    def groups(self) -> int:
        """The devices of the schedule: each stands for ``tensor`` of them."""
        return self.stages * self.replicas

    @property
    def devices(self) -> int:
        """Of the whole job."""
        return self.groups * self.tensor


GRID = tuple(f.name for f in fields(Grid))
"""Names of a grid's fields."""
AnyShape = TypeVar("AnyShape", bound="ParallelShape")


@dataclass(frozen=True, kw_only=True)
class ParallelShape(Grid, ScheduleOptions):
    """A schedule on a grid of devices; not held against the schedule's rules, see ``plan.predict.form``."""

    schedule: str

    @classmethod
    def on(cls: type[AnyShape], grid: Grid, schedule: str, **more: Any) -> AnyShape:
        """The schedule on these devices; ``more`` are further fields."""
        return cls(**{key: getattr(grid, key) for key in GRID}, schedule=schedule, **more)

    @property
    def grid(self) -> Grid:
        """Its devices and micro-batches."""
        return Grid(*(getattr(self, key) for key in GRID))
