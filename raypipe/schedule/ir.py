"""The schedule IR: a training step as data.

Glossary. Papers use these words in different ways; raypipe uses those of ZeroPP and zero-bubble:

    stage        a contiguous run of model layers      device    one entry of a placement
    micro-batch  one forward + backward unit of a step replica   one chain of stages; ``placement[replica][stage]``
    slice        a micro-batch's share of the sequence: with k slices, ids m*k .. m*k + k - 1 are micro-batch m
    task         one unit of work of a device          order     a device's tasks, in the order it runs them
    activation   what a stage keeps of a micro-batch from its F (its R, where recomputed) to its last task: W or BW
    frozen       a stage without a trained parameter; it has no W, and no B either where no gradient passes through it
    flush        the end of a synchronous step, when every stage has all its gradients and updates its weights
    pair         a forward and another micro-batch's backward that a device runs together, F||B
    version      a copy of a stage's weights that some micro-batch still needs; a flushed step has one

Kinds of task (``kinds.py`` has a row of properties for each):

    F forward   B gradient of the input   W gradient of the weights   BW both at once   R recompute of a forward
    DF dispatch of tokens to the experts of a stage   CF combine of their results   DB, CB the same for gradients
    AG all-gather of a stage's weights from the shards of its group   RS reduce-scatter of its gradients to the shards
    FREE reshard: drop the gathered weights                           AR all-reduce of gradients over a stage's holders
    U optimizer update of a stage

A replica is one of Chimera's directions, or a data-parallel copy in a replicated schedule; a job's
``parallel.replicas`` counts copies of a whole placement. Note that PyTorch writes ``I`` for our ``B`` and ``B`` for our
``BW``. Task ``2F0`` is stage 2, forward, micro-batch 0; ``2F0,1`` carries two micro-batches (Chimera's forward
doubling); ``2F0@1`` belongs to replica 1; ``2F3|1BW0`` is a pair. Bookkeeping tasks carry no micro-batch: ``2AG``,
``2AR``, ``2U``. AG, RS and FREE may occur several times per step; equal tasks are told apart by their order on their
device.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from raypipe.schedule.kinds import BACKWARD, WEIGHT_GRADIENTS, Kind


class Task(NamedTuple):
    """One unit of work of a device: ``(kind, stage, mbs, replica)``."""

    kind: Kind
    stage: int
    mbs: tuple[int, ...]
    """Ids of its micro-batches: one, or several in a paired forward; none for bookkeeping."""
    replica: int = 0

    def __str__(self) -> str:
        mbs = ",".join(map(str, self.mbs))
        return f"{self.stage}{self.kind}{mbs}" + (f"@{self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Which stage feeds which: a DAG whose edges go from earlier to later stages."""

    stages: int
    edges: tuple[tuple[int, int], ...]

    @staticmethod
    def chain(stages: int) -> StageGraph:
        """Return the graph ``0 -> 1 -> ... -> stages-1``."""
        return StageGraph(stages, tuple((s, s + 1) for s in range(stages - 1)))

    def inputs(self) -> list[list[int]]:
        """Return, per stage, the stages whose activations it reads."""
        result: list[list[int]] = [[] for _ in range(self.stages)]
        for src, dst in self.edges:
            result[dst].append(src)
        return result

    def outputs(self) -> list[list[int]]:
        """Return, per stage, the stages that read its activations and send gradients back."""
        result: list[list[int]] = [[] for _ in range(self.stages)]
        for src, dst in self.edges:
            result[src].append(dst)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Options of the dependency rule; see ``deps.dependencies``."""

    recompute: Literal["early", "late"] = "early"
    """With ``early``, R waits for its own F only; with ``late``, also for the incoming gradient (Merak section 3.3)."""
    w_dep: Literal["B", "grad"] = "B"
    """With ``B``, W waits for B of its stage; with ``grad``, only for the incoming gradient (out-of-order backprop)."""
    skip_first_b: bool = False
    """A stage that sends no gradient on (stage 0, and others behind frozen stages alone) has W tasks but no B."""
    experts: tuple[int, ...] = ()
    """Stages of experts alone, in ascending order, whose tokens come by DF and DB and leave by CF and CB. Where other
    stages hold experts, the all-to-all is inside their F and B."""
    frozen: tuple[int, ...] = ()
    """Stages without a trained parameter, in ascending order; see ``Backward``."""
    slices: int = 1
    """Slices that each micro-batch is cut into along the sequence, k. Slice i attends to the keys and values of slices
    up to i, so forwards run in order and backwards in reverse (Seq1F1B, arXiv:2406.03488)."""

    def neighbour(self, mb: int, along: int) -> int | None:
        """Return the id ``along`` slices after ``mb``'s (before, if negative); None beyond its micro-batch's ends."""
        place = mb % self.slices + along
        return mb + along if 0 <= place < self.slices else None


Versions = Literal["flush", "stash", "2bw"]
"""Weight versions: ``flush`` has one (synchronous), ``stash`` one per micro-batch in flight (PipeDream), ``2bw`` two
(PipeDream-2BW)."""


class Backward(NamedTuple):
    """The parts of a stage's backward, for every micro-batch."""

    input_grad: bool
    """It has a B: a trained parameter lies before it, or in it (unless its W runs the whole backward)."""
    weight_grad: bool
    """It has a W: it has a trained parameter."""
    sends_to: tuple[int, ...]
    """The stages that a gradient is sent to: of those whose activations it reads, the ones with a backward."""

    @property
    def exists(self) -> bool:
        """True if there is any task of the backward."""
        return self.input_grad or self.weight_grad

    @property
    def last(self) -> frozenset[Kind]:
        """The kinds of task of which one is the stage's last for a micro-batch and ends its activation.

        Where W may run before B, W counts as the last one: it needs the activation, and B then only sends.
        """
        if self.weight_grad:
            return WEIGHT_GRADIENTS
        return BACKWARD if self.input_grad else _FORWARD


_FORWARD: frozenset[Kind] = frozenset({"F"})


@lru_cache(maxsize=4096)
def backwards(graph: StageGraph, rules: Rules) -> tuple[Backward, ...]:
    """Return what the backward of each stage consists of: the one answer to whether a stage has a B or a W.

    Gradients go back from the loss to the first trained parameter and no further.

    >>> [(b.input_grad, b.weight_grad, b.sends_to) for b in backwards(StageGraph.chain(3), Rules(frozen=(0, 2)))]
    [(False, False, ()), (True, True, ()), (True, False, (1,))]
    """
    inputs = graph.inputs()
    result: list[Backward] = []
    for stage in range(graph.stages):
        trained = stage not in rules.frozen
        to = tuple(s for s in inputs[stage] if result[s].exists)
        result.append(Backward(bool(to) or (trained and not rules.skip_first_b), trained, to))
    return tuple(result)


ZERO_LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The share that data-parallel copies keep of each stage's state (ZeRO, Rajbhandari et al. 2020, section 5).

    The schedule's tasks say when: a stage of level 1 or 2 has one AG, before its first use in a step, which brings the
    weights that the shards' updates made; one of level 3 has an AG before and a FREE after every window of use. Levels
    1 and above have an RS after each group of weight gradients, and their U updates the device's shard alone.
    """

    levels: tuple[int, ...]
    """Per stage: 0 divides nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    copies: int = 1
    """Data-parallel copies that the schedule holds; copy w has replicas w*R to w*R + R - 1 (``passes.replicate``)."""
    group: int | None = None
    """Consecutive copies that share one set of shards; further copies replicate them (HSDP). None: all copies."""

    def group_of(self, replica: int, replicas: int) -> tuple[int, int]:
        """Return the shard group of a replica: (which of a copy's replicas, number of its group of copies).

        >>> [Sharding(levels=(3,), copies=4, group=2).group_of(r, 4) for r in range(4)]
        [(0, 0), (0, 0), (0, 1), (0, 1)]
        """
        of_copy = replicas // self.copies
        return replica % of_copy, replica // of_copy // (self.group or self.copies)

    def members(self, replica: int, replicas: int) -> tuple[int, ...]:
        """Return the replicas that share shards with this one, itself included, in the order of their shards."""
        own = self.group_of(replica, replicas)
        return tuple(r for r in range(replicas) if self.group_of(r, replicas) == own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A placement and, per device, an ordered list of tasks."""

    name: str
    placement: tuple[tuple[int, ...], ...]
    """``placement[replica][stage]`` is the device that holds the stage."""
    orders: tuple[tuple[Task, ...], ...]
    """Per device, its tasks in the order they run."""
    microbatches: int
    """Number of micro-batch ids in a step, over all replicas; ids count from 0, and halves have ids of their own."""
    graph: StageGraph
    rules: Rules = field(default_factory=Rules)
    size: Fraction = Fraction(1)
    """Share of a full micro-batch that one id stands for; 1/2 in backward halving, 1/k with k slices."""
    versions: Versions = "flush"
    sharding: Sharding | None = None
    """What data-parallel copies divide; None: nothing, and there are no AG, RS and FREE."""
    exchange: tuple[int, int] = (1, 1)
    """Data-parallel copies that the schedule holds, and how many consecutive ones divide the experts of a stage: what
    these do of DF, CF, DB and CB for the same micro-batch of theirs is one all-to-all."""
    joined: frozenset[Task] = frozenset()
    """The second halves of pairs: each starts and ends with the forward right before it in its device's order."""

    @classmethod
    def of_chain(
        cls,
        name: str,
        placement: Sequence[Sequence[int]],
        orders: Iterable[Iterable[Task]],
        microbatches: int,
        rules: Rules | None = None,
        size: Fraction | None = None,
        joined: Iterable[Task] = (),
    ) -> Schedule:
        """Return a schedule whose stages form a chain, with whole micro-batches or, where ``rules`` say so, slices."""
        rules = rules or Rules()
        return cls(
            name=name,
            placement=tuple(map(tuple, placement)),
            orders=tuple(map(tuple, orders)),
            microbatches=microbatches,
            graph=StageGraph.chain(len(placement[0])),
            rules=rules,
            size=size or Fraction(1, rules.slices),
            joined=frozenset(joined),
        )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of stages of one replica."""
        return self.graph.stages

    @property
    def share_of_samples(self) -> Fraction:
        """Share of a full micro-batch's samples that one id runs on; a slice runs on all of them."""
        return self.size * self.rules.slices

    @property
    def backwards(self) -> tuple[Backward, ...]:
        """Per stage, what its backward consists of."""
        return backwards(self.graph, self.rules)

    def zero_level(self, stage: int) -> int:
        """Return the ZeRO level of a stage, 0 to 3."""
        return 0 if self.sharding is None else self.sharding.levels[stage]

    @property
    def replicas(self) -> int:
        """Number of replicas (Chimera's directions times data-parallel copies)."""
        return len(self.placement)

    @property
    def pairs(self) -> dict[Task, Task]:
        """Each task of a pair with its other half."""
        result: dict[Task, Task] = {}
        for order in self.orders if self.joined else ():
            for first, second in pairwise(order):
                if second in self.joined:
                    result[first], result[second] = second, first
        return result

    def unpaired(self) -> Schedule:
        """Return the schedule with the halves of its pairs one after another."""
        return replace(self, joined=frozenset())

    def tasks(self) -> Iterable[Task]:
        """Iterate over all tasks, device by device."""
        for order in self.orders:
            yield from order

    def with_orders(self, orders: Iterable[Iterable[Task]], **changes: object) -> Schedule:
        """Return the schedule with other orders, as passes do; ``changes`` are further fields.

        A pair lasts as long as its backward, joint or its B alone, comes right after the same forward.
        """
        rows = tuple(tuple(o) for o in orders)
        if self.joined and "joined" not in changes:
            held = {second[1:]: first for second, first in self.pairs.items() if second in self.joined}
            kept = (b for row in rows for a, b in pairwise(row) if b.kind in BACKWARD and held.get(b[1:]) == a)
            changes["joined"] = frozenset(kept)
        return replace(self, orders=rows, **changes)  # type: ignore[arg-type]

    def without(self, kinds: Container[Kind]) -> Schedule:
        """Return the schedule without tasks of some kinds."""
        return self.with_orders([t for t in order if t.kind not in kinds] for order in self.orders)


def grid(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """Draw the orders, with the task at ``mark`` = (device, position) between ``>`` and ``<``.

    Large schedules are cut to 6 positions and 8 devices on either side of the mark.

    >>> from raypipe.schedule import Shape, generate
    >>> print(grid(generate("1f1b", Shape(devices=2, microbatches=2)), mark=(1, 1)))
    device 0: 0F0 0F1    0BW0 0BW1
    device 1: 1F0 >1BW0< 1F1  1BW1   <-- here
    """
    at_device, at = mark if mark is not None else (0, 0)
    longest = max((len(o) for o in schedule.orders), default=0)
    columns = range(max(0, at - 6), min(longest, at + 7))
    shown = range(max(0, at_device - 8), min(schedule.devices, at_device + 9))
    cells: list[list[str]] = []
    for d in shown:
        order = schedule.orders[d]
        row = ["|" * (order[k] in schedule.joined) + str(order[k]) if k < len(order) else "" for k in columns]
        if d == at_device and mark is not None and at in columns and at < len(order):
            row[at - columns.start] = f">{order[at]}<"
        cells.append(row)
    widths = [max((len(r[k]) for r in cells), default=0) for k in range(len(columns))]
    label = len(str(shown[-1])) if len(shown) else 1
    lines = [f"... {shown.start} devices above"] if shown.start else []
    for d, row in zip(shown, cells, strict=True):
        text = " ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        before = "... " if columns.start else ""
        after = " ..." if columns.stop < len(schedule.orders[d]) else ""
        here = "   <-- here" if mark is not None and d == at_device else ""
        lines.append(f"device {d:>{label}}: {before}{text}{after}{here}")
    if shown.stop < schedule.devices:
        lines.append(f"... {schedule.devices - shown.stop} devices below")
    return "\n".join(lines)
