"""Step time and memory of one configuration of a paper, from a profile alone; the papers' models as layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from raypipe.cost.gpt_work import MEGATRON, PYTORCH_2020, gpt_work
from raypipe.cost.layer_work import LayerWork, TaskWork
from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.cost.stages import Cut, costs_of, gradient_width, parameters
from raypipe.job import GptSpec
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import add_recompute, add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync
from raypipe.simulate.engine import simulate
from raypipe.simulate.series import series, steady


@dataclass(frozen=True, kw_only=True)
class Run:
    """A timed run of an asynchronous scheme, with its drain; what was measured is the mean of its updates."""

    updates: int
    warmed: bool
    """The clock starts with the end of the first update; else when the first device has done the forwards that fill
    its pipeline."""


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
    recompute_last: bool = False
    """Also on the last stage of an asynchronous scheme: PipeDream's runtime, of both, leaves it out there, where the
    backward comes right away."""
    chunks: int = 1
    unit: int | None = None
    concat: Literal["direct", "doubling", "halving"] = "direct"
    sync: Sync = "lazy"
    run: Run | None = None
    """How a step was timed; None: in the long run."""

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
    if not config.recompute or config.concat == "doubling":
        return made
    spared = 0 if made.versions == "flush" or config.recompute_last else 1
    return add_recompute(made, "late", range(made.stages - spared))


def even_cut(layers: int, stages: int) -> Cut:
    """Blocks dealt out evenly, as Chimera's authors do; embedding and head go with the first and the last."""
    edges = [round(s * (layers - 2) / stages) for s in range(stages + 1)]
    cut = [list(range(1 + a, 1 + b)) for a, b in pairwise(edges)]
    return [[0, *cut[0]], *cut[1:-1], [*cut[-1], layers - 1]] if stages > 1 else [list(range(layers))]


def costs(profile: Profile, config: Config, cut: Cut | None = None) -> CostTable:
    """The cost table of a configuration."""
    schedule = pipeline(config)
    cut = even_cut(len(profile.layers), schedule.stages) if cut is None else cut
    return costs_of(in_pieces(profile, config, cut), cut, config.microbatch, schedule, config.width)


def in_pieces(profile: Profile, config: Config, cut: Cut) -> Profile:
    """The profile with gradient sums cut as the code of Chimera's authors cuts them.

    PipeDream and 2BW wrap stages into DistributedDataParallel, whose pieces have 25 MiB; Chimera sums a stage in
    three or four; the others sum all of a stage in one call.
    """
    path, pieces = profile.collective, None
    if config.schedule.startswith("pipedream"):
        pieces = 25.0 * 2**20
    elif config.schedule == "chimera":
        pieces = max(parameters(profile, layers) for layers in cut) * gradient_width(profile.dtype) / 4
    if path is None or pieces is None:
        return profile
    return profile.model_copy(update={"collective": path.model_copy(update={"piece_bytes": pieces})})


def step_seconds(profile: Profile, config: Config, cut: Cut | None = None, table: CostTable | None = None) -> float:
    """Seconds of a mini-batch, by the simulator."""
    schedule = pipeline(config)
    table = costs(profile, config, cut) if table is None else table
    if schedule.versions == "flush":
        # Two copies behave like any number of them: the times of the gradient sums have the number in them.
        whole = replicate(schedule, min(config.width, 2))
        whole = add_updates(place_gradient_sync(whole, config.sync, replace(table, update=(0.0,) * table.stages)))
        return simulate(whole, table).makespan
    # DistributedDataParallel sums in the last backward before an update, and the device waits for it: one more part of
    # the update.
    waits = tuple(a + u for a, u in zip(table.all_reduce, table.update, strict=True))
    alone = replace(table, all_reduce=(0.0,) * table.stages, update=waits)
    if config.run is None:
        return steady(schedule, alone)
    every = 1 if schedule.versions == "stash" else config.count  # micro-batches of an update
    steps = config.run.updates * every // config.count
    ends = series(schedule, alone, steps)
    if config.run.warmed:
        return (ends[-1] - ends[0]) / (steps - 1)
    return (ends[-1] - (config.depth - 1) * alone.forward[0]) / steps


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


# The papers' models as layers with their work, checked against the published numbers of parameters.


def gpt2_64() -> Sequence[LayerWork]:
    """Chimera's GPT-2 of 64 layers: sequences of 632 tokens, learned positions for 1,024 (table 4: 1,389,327,360)."""
    shape = GptSpec(
        layers=64, hidden=1280, heads=20, sequence=632, vocabulary=50257, dropout=0.1, tie_embeddings=False,
        activation="gelu-tanh",  # Hugging Face's gelu_new
    )  # fmt: skip
    first, *others = gpt_work(shape, "float32", PYTORCH_2020)
    unused = (1024 - shape.sequence) * shape.hidden  # positions that are held and summed all the same
    return (replace(first, parameters=first.parameters + unused), *others)


def bert_48() -> Sequence[LayerWork]:
    """Chimera's BERT of 48 layers: sequences of 128 tokens (table 4: 669,790,012)."""
    shape = GptSpec(layers=48, hidden=1024, heads=16, sequence=128, vocabulary=30522, dropout=0.1, tie_embeddings=False)
    h = shape.hidden
    first, *blocks, last = gpt_work(shape, "float32", PYTORCH_2020)
    # 512 positions, 2 segments and a norm before the blocks; pooler, transform and norm, a bias for each word and the
    # next-sentence classifier after them. The norm of a GPT's head is the transform's.
    first = replace(first, parameters=first.parameters + (512 - shape.sequence + 2 + 2) * h)
    extra = TaskWork(flops=2.0 * shape.sequence * h * h)
    added = 2 * (h * h + h) + shape.vocabulary + 2 * h + 2

    def more(task: TaskWork) -> TaskWork:
        return replace(task, flops=task.flops + extra.flops)

    last = replace(
        last, parameters=last.parameters + added, forward=more(last.forward), input_grad=more(last.input_grad),
        weight_grad=more(last.weight_grad),
    )  # fmt: skip
    return (first, *blocks, last)


def zeropp(layers: int, hidden: int, heads: int) -> Sequence[LayerWork]:
    """ZeroPP's GPT-style models (table 4), sequences of 1,024 tokens, in bfloat16 throughout."""
    shape = GptSpec(
        layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=50257, dropout=0.0, tie_embeddings=False
    )
    return gpt_work(shape, "bfloat16", MEGATRON)
