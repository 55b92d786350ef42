"""Schedules as data: the IR, one dependency rule, generators by name, passes and the verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from raypipe.errors import ScheduleError, check_known
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families import chimera, dual_pipe, greedy, out_of_order, textbook, vocabulary, zero_bubble
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import check_memory
from raypipe.schedule.shape import NEUTRAL, Shape

__all__ = ["SCHEDULES", "Family", "Shape", "generate", "stages_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A named schedule: how to make it and one line about it."""

    make: Callable[[Shape, CostTable], Schedule]
    about: str
    options: frozenset[str] = frozenset()
    """Fields of a Shape it reads besides devices and microbatches."""
    fixed_chunks: int | None = None
    """Stages per device where the placement decides it (ZB-V: 2)."""
    placement: Callable[[Shape], tuple[int, ...]] | None = None
    """Device of each stage, for families that search for their orders, so that nobody has to wait for an order to learn
    where stages are; such a family exists for every number of devices and chunks."""
    paired: bool = False
    """It is made for pairs, which gain where one half hides the other's all-to-all; a search takes it where named."""
    fills: bool = False
    """Every device runs all forwards of a unit (without units: of the step) before its first weight gradient, in
    an order made for even costs; so it holds all their activations at one moment."""
    in_turn: bool = False
    """Stage s of S runs S - s forwards, if there are as many, before its first backward; each device has one stage."""

    def stages(self, shape: Shape) -> int:
        """Stages of one replica: devices times chunks, and those of a vocabulary that devices divide."""
        more = shape.devices + 1 if shape.vocabulary == "split" else 0
        return shape.devices * (self.fixed_chunks or shape.chunks) + more

    def check(self, name: str, shape: Shape) -> None:
        """Refuse an option that this family would have to ignore.

        Raises:
            ScheduleError: naming the option.
        """
        for option, neutral in NEUTRAL.items():
            value = getattr(shape, option)
            if option in self.options or value == neutral:
                continue
            if option == "chunks" and value == self.fixed_chunks:
                continue
            if option == "memory_limit":  # any schedule can be held against a limit; see generate
                continue
            raise ScheduleError(option, f"{name} has no use for {option} = {value}", f"leave {option} out")


_CHUNKS, _MEMORY, _SLICES = frozenset({"chunks"}), frozenset({"memory_limit"}), frozenset({"slices"})
_VOCABULARY = frozenset({"vocabulary"})

SCHEDULES: dict[str, Family] = {
    "gpipe": Family(make=textbook.gpipe, about="all forwards, then all backwards", options=_SLICES, fills=True),
    "1f1b": Family(
        make=vocabulary.one_f_one_b,
        about="warm up, then one forward for one backward, then drain",
        options=_SLICES | _VOCABULARY,
        in_turn=True,
    ),
    "dapple": Family(
        make=vocabulary.one_f_one_b, about="the same as 1f1b", options=_SLICES | _VOCABULARY, in_turn=True
    ),
    "interleaved-1f1b": Family(
        make=textbook.interleaved,
        about="1F1B with several stages a device: smaller bubbles, more messages",
        options=_CHUNKS | _SLICES,
    ),
    "bfs": Family(
        make=textbook.breadth_first,
        about="breadth-first: a stage takes all micro-batches in a row; for sharded weights",
        options=_CHUNKS,
        fills=True,
    ),
    "chimera": Family(
        make=chimera.chimera,
        about="bidirectional pipelines: half the bubbles for two copies of the weights",
        options=frozenset({"pipelines", "concat"}),
    ),
    "chimera-tight": Family(
        make=chimera.tight, about="Chimera's placement in an order without bubbles between units, for BW = 2F"
    ),
    "gems": Family(make=chimera.gems, about="two opposite replicas take turns: one activation per device"),
    "dualpipe": Family(
        make=dual_pipe.dualpipe,
        about="two opposite pipelines whose forwards and backwards run in pairs: all-to-all hides behind compute",
        paired=True,
    ),
    "dualpipev": Family(
        make=dual_pipe.dualpipev,
        about="DualPipe in a V: one copy of the weights on half of the devices",
        fixed_chunks=2,
        paired=True,
    ),
    "interleaved-overlap": Family(
        make=dual_pipe.interleaved_overlap,
        about="interleaved 1F1B in pairs, one more micro-batch ahead (Megatron's combined 1F1B)",
        options=_CHUNKS,
        paired=True,
    ),
    "pipedream": Family(
        make=textbook.pipedream, about="asynchronous 1F1B: an update per micro-batch on stashed weights"
    ),
    "pipedream-2bw": Family(
        make=textbook.pipedream_2bw, about="asynchronous 1F1B with two weight versions: gradients one step old"
    ),
    "zb-h1": Family(
        make=zero_bubble.h1,
        about="zero bubble in 1F1B's memory: split backward, least makespan",
        options=_MEMORY | _SLICES,
        placement=greedy.ring,
    ),
    "zb-h2": Family(
        make=zero_bubble.h2,
        about="zero bubble in twice 1F1B's memory: no idle time inside a device's span",
        options=_MEMORY,
        placement=greedy.ring,
    ),
    "zb-v": Family(
        make=zero_bubble.zb_v,
        about="zero bubble in 1F1B's memory: two stages a device in a V",
        fixed_chunks=2,
        options=_MEMORY,
        placement=zero_bubble.vee,
    ),
    "zeropp": Family(
        make=zero_bubble.zeropp,
        about="units of U micro-batches, stage by stage, W's in the bubbles; for sharded weights",
        options=frozenset({"chunks", "unit", "memory_limit"}),
        placement=greedy.ring,
        fills=True,
    ),
    "early-recompute": Family(
        make=textbook.early_recompute, about="1F1B that recomputes while it waits for a gradient"
    ),
    "shifted-critical-path": Family(
        make=textbook.shifted_critical_path, about="early recompute with none on the last stage (Merak)"
    ),
    "model-parallel": Family(
        make=out_of_order.model_parallel, about="one micro-batch at a time through all devices", options=_CHUNKS
    ),
    "fast-forward": Family(
        make=out_of_order.fast_forward,
        about="input gradients before weight gradients (OOO-Pipe1)",
        options=_CHUNKS,
        placement=out_of_order.blocks,
        fills=True,
    ),
    "modulo": Family(
        make=out_of_order.modulo,
        about="fast-forwarding with stage s on device s mod D (OOO-Pipe2)",
        options=_CHUNKS,
        placement=greedy.ring,
    ),
}
"""All named schedules."""


def _family(name: str) -> Family:
    check_known(ScheduleError, "schedule", name, SCHEDULES)
    return SCHEDULES[name]


def stages_of(name: str, shape: Shape) -> int:
    """Return the number of stages of one replica that ``generate`` makes, which is the length of a cost table's tuples.

    Raises:
        ScheduleError: the name is unknown, or the family does not have one of the options.
    """
    family = _family(name)
    family.check(name, shape)
    return family.stages(shape)


@no_collection()
def generate(name: str, shape: Shape, costs: CostTable | None = None) -> Schedule:
    """Generate the named schedule.

    Args:
        name: a key of ``SCHEDULES``.
        shape: devices, micro-batches and the family's options.
        costs: one value per stage, by which some families order their tasks; by default F = B = W = 1.

    Raises:
        ScheduleError: the name is unknown, the family has no schedule of this shape, the costs have another number of
            stages, or the schedule holds more activations than ``shape.memory_limit``.
    """
    stages = stages_of(name, shape)
    costs = CostTable.even(stages) if costs is None else costs
    if costs.stages != stages:
        raise ScheduleError("costs", f"{costs.stages} values for {stages} stages", f"give 1 or {stages} values")
    schedule = replace(_family(name).make(shape, costs), name=name)
    if shape.memory_limit is not None:
        check_memory(schedule, shape.memory_limit)
    return schedule
