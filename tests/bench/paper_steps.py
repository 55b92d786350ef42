"""Step time and memory of one configuration of a paper, from a profile alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.cost.stages import Cut, costs_of
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import add_recompute, add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period


@dataclass(frozen=True, kw_only=True)
class Config:
    """One way to run a model, in the papers' letters."""

    schedule: str
    width: int
    """W."""
    depth: int
    """D."""
    microbatch: int
    """B."""
    count: int
    """N."""
    recompute: bool = False
    chunks: int = 1
    unit: int | None = None
    concat: Literal["direct", "doubling", "halving"] = "direct"
    sync: Sync = "lazy"

    @property
    def batch(self) -> int:
        """B_hat."""
        return self.microbatch * self.count * self.width

    def __str__(self) -> str:
        again = ", R" if self.recompute or self.concat == "doubling" else ""
        return f"W={self.width}, D={self.depth}, B={self.microbatch}{again}"


@lru_cache(maxsize=512)
def pipeline(config: Config) -> Schedule:
    """The schedule of one data-parallel copy."""
    shape = Shape(
        devices=config.depth, microbatches=config.count, chunks=config.chunks, unit=config.unit, concat=config.concat
    )
    made = generate(config.schedule, shape)
    return add_recompute(made, "late") if config.recompute and config.concat != "doubling" else made


def even_cut(layers: int, stages: int) -> Cut:
    """Blocks dealt out evenly, as Chimera's authors do; embedding and head go with the first and the last."""
    edges = [round(s * (layers - 2) / stages) for s in range(stages + 1)]
    cut = [list(range(1 + a, 1 + b)) for a, b in pairwise(edges)]
    return [[0, *cut[0]], *cut[1:-1], [*cut[-1], layers - 1]] if stages > 1 else [list(range(layers))]


def costs(profile: Profile, config: Config, cut: Cut | None = None) -> CostTable:
    """The cost table of a configuration."""
    schedule = pipeline(config)
    cut = even_cut(len(profile.layers), schedule.stages) if cut is None else cut
    return costs_of(profile, cut, config.microbatch, schedule, config.width)


def step_seconds(profile: Profile, config: Config, cut: Cut | None = None, table: CostTable | None = None) -> float:
    """Seconds of a mini-batch, by the simulator."""
    schedule = pipeline(config)
    table = costs(profile, config, cut) if table is None else table
    if schedule.versions == "flush":
        # Two copies behave like any number of them: the times of the gradient sums have the number in them.
        whole = replicate(schedule, min(config.width, 2))
        whole = add_updates(place_gradient_sync(whole, config.sync, replace(table, update=(0.0,) * table.stages)))
        return simulate(whole, table).makespan
    none = (0.0,) * table.stages
    steady = period(schedule, replace(table, all_reduce=none, update=none))
    backward = table.by_kind("BW")
    if schedule.versions == "2bw":  # the sum runs beside the last micro-batch's backward
        late = max(max(0.0, a - b) for a, b in zip(table.all_reduce, backward, strict=True))
        return steady + late + max(table.update)
    # PipeDream sums the gradients over the copies after every micro-batch's backward, and updates.
    each = zip(table.forward, backward, table.all_reduce, table.update, strict=True)
    return max(steady, config.count * max(map(sum, each)))


def memory(profile: Profile, config: Config) -> tuple[DeviceMemory, ...]:
    """Memory of each device of one copy."""
    schedule = pipeline(config)
    cut = even_cut(len(profile.layers), schedule.stages)
    return device_memory(profile, cut, schedule, config.microbatch, copies=config.width)


def fits(profile: Profile, config: Config) -> bool:
    """Whether every device has the memory."""
    return max(d.total for d in memory(profile, config)) <= profile.memory_bytes


def throughput(profile: Profile, config: Config) -> float:
    """Samples per second."""
    return config.batch / step_seconds(profile, config)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def error(ours: float, theirs: float) -> str:
    """Relative error as text."""
    return f"{ours / theirs - 1:+.0%}"
