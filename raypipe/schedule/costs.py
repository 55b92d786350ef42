"""The cost table: the time of each kind of task on each stage, and of messages between devices.

All times are plain numbers in one unit: seconds in runs, abstract units on paper. ``cost/`` computes them from a model
or a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.kinds import JOINT, KINDS, TRAITS, Kind

LONGEST = 1e12
"""Largest time that a user may give, in any unit; sums over a step then stay exact enough to compare."""
_FIELDS: dict[str, tuple[str, ...]] = {kind: traits.cost for kind, traits in TRAITS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Time of each kind of task per stage, for one full micro-batch; what is left out takes no time."""

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    all_reduce: tuple[float, ...] = ()
    """Over all holders; where gradients are sharded, of the shards over the groups that replicate them."""
    update: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    """One all-gather of the stage's weights over its shard group."""
    reduce_scatter: tuple[float, ...] = ()
    """One reduce-scatter of its gradients over its shard group."""
    attention: tuple[float, ...] = ()
    """The part of ``forward`` that grows along the sequence: causal attention. Of k slices, slice i takes (2i + 1)/k^2
    of it, and 1/k of all else. Left out, there is none."""
    attention_grad: tuple[float, ...] = ()
    """The same part of ``input_grad``; weight gradients have none."""
    dispatch: tuple[float, ...] = ()
    """The part of ``forward``, and of ``input_grad`` on the way back, in which tokens travel to experts and the device
    waits for them. Left out, there is none."""
    combine: tuple[float, ...] = ()
    """The same for the results of experts on their way to the tokens' devices."""
    overlap: float = 1.0
    """Share of what one half of a pair could hide of the other's dispatch and combine that it does hide, 0 to 1."""
    comm: Comm = 0.0
    """Latency of a message between two devices; messages inside a device take no time. It is one number for every link,
    or a tuple whose value s is the latency between stages s and s+1 in both directions; see ``latency`` for stages
    further apart. The tuple has S - 1 values or S (the last is unused). If all values are equal, it becomes a
    number. Or a mapping with the latency of each edge of the stage graph."""

    @staticmethod
    def even(
        stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        recompute: float = 0.0,
        comm: Comm = 0.0,
    ) -> CostTable:
        """Return a table with the same costs for every stage."""
        return CostTable(
            forward=(forward,) * stages,
            input_grad=(input_grad,) * stages,
            weight_grad=(weight_grad,) * stages,
            recompute=(recompute,) * stages,
            comm=comm,
        )

    def __post_init__(self) -> None:
        for name in _LEFT_OUT:
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * len(self.forward))
        single = [kind for kind, fields in _FIELDS.items() if len(fields) == 1]
        lengths = {len(self.by_kind(k)) for k in single}
        if len(lengths) != 1:
            raise ScheduleError("costs", f"lists of different lengths {sorted(lengths)}", "give one value per stage")
        for kind in single:
            own = self.by_kind(kind)
            if own and min(own) >= 0 and sum(own) < float("inf"):  # not so if one is no number
                continue
            for stage, value in enumerate(own):
                if not 0 <= value < float("inf"):
                    raise ScheduleError("costs", f"{kind} of stage {stage} is {value}", "use a finite number >= 0")
        for name, whole in (("attention", self.forward), ("attention_grad", self.input_grad)):
            part = getattr(self, name)
            if len(part) != len(whole) or not all(0 <= p <= w for p, w in zip(part, whole, strict=True)):
                what = "forward" if name == "attention" else "input_grad"
                raise ScheduleError(name, f"{part} is no part of {what}", f"use numbers from 0 to {what}, per stage")
        if not all(len(part) == self.stages and min(part) >= 0 for part in (self.dispatch, self.combine)):
            why = f"dispatch {self.dispatch}, combine {self.combine}"
            raise ScheduleError("costs", why, "give one number >= 0 per stage")
        if not 0 <= self.overlap <= 1:
            raise ScheduleError("overlap", f"{self.overlap} is no share", "use 0 to 1")
        for value in latencies(self.comm):
            if not 0 <= value < float("inf"):
                raise ScheduleError("costs", f"comm is {value}", "use a finite number >= 0")
        if isinstance(self.comm, tuple):
            object.__setattr__(self, "comm", _per_link(self.comm, self.stages))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def links(self) -> tuple[float, ...]:
        """Latency of the link after each stage; the last value is unused. That of a skip counts for all it passes."""
        if isinstance(self.comm, Mapping):
            over = [[t for (a, b), t in self.comm.items() if a <= s < b] for s in range(self.stages)]
            return tuple(max(result, default=0.0) for result in over)
        return self.comm if isinstance(self.comm, tuple) else (self.comm,) * self.stages

    def latency(self, a: int, b: int) -> float:
        """Return the latency of a message between two stages on different devices, in either direction."""
        return latency(self.comm, a, b)

    def by_kind(self, kind: str) -> tuple[float, ...]:
        """Return the times per stage of one kind; ``BW`` is B plus W, and FREE takes none."""
        fields: list[tuple[float, ...]] = [getattr(self, name) for name in _FIELDS[kind]]
        if not fields:
            return (0.0,) * self.stages
        return fields[0] if len(fields) == 1 else tuple(map(sum, zip(*fields, strict=True)))

    def durations(self, schedule: Schedule, tasks: list[Task]) -> list[float]:
        """Return the time of each task: its stage's cost times the number of its micro-batches, or its slice's share.

        Both halves of a pair take the pair's time (``together``).

        Raises:
            ScheduleError: the table has another number of stages than the schedule.
        """
        alone = self._alone(schedule, tasks)
        if not schedule.joined:
            return alone
        other, known = schedule.pairs, list(schedule.pairs)
        time = dict(zip(known, self._alone(schedule, known), strict=True))
        size = float(schedule.size)
        return [
            self.together((task, time[task]), (other[task], time[other[task]]), size) if task in other else own
            for task, own in zip(tasks, alone, strict=True)
        ]

    def together(self, one: tuple[Task, float], two: tuple[Task, float], size: float = 1.0) -> float:
        """Return the time of a pair of tasks, each given with its own time.

        It is at most their sum. At best neither the device nor the links rest: the pair takes as long as both halves'
        compute, both halves' dispatch and combine, or the longer half, whichever is longest. ``overlap`` is the share
        of the way there.

        >>> from dataclasses import replace
        >>> table = replace(CostTable.even(1, 10, 10, 10), dispatch=(2.0,), combine=(2.0,))
        >>> table.together((Task("F", 0, (1,)), 10.0), (Task("BW", 0, (0,)), 20.0))
        22.0
        """
        whole = one[1] + two[1]
        travel = sum((self.dispatch[t.stage] + self.combine[t.stage]) * len(t.mbs) * size for t, _ in (one, two))
        least = min(whole, max(whole - travel, travel, one[1], two[1]))
        return whole - self.overlap * (whole - least)

    def _alone(self, schedule: Schedule, tasks: list[Task]) -> list[float]:
        if self.stages != schedule.stages:
            raise ScheduleError(
                "costs", f"{self.stages} values for {schedule.stages} stages", f"give 1 or {schedule.stages} values"
            )
        table = {k: self.by_kind(k) for k in KINDS}
        backwards = schedule.backwards
        if not all(backward.input_grad for backward in backwards):  # without a B, a joint backward is W alone
            for joint in JOINT:
                table[joint] = tuple(
                    t if backward.input_grad else w
                    for t, w, backward in zip(table[joint], self.weight_grad, backwards, strict=True)
                )
        size = float(schedule.size)
        if size == 1.0:
            return [table[k][s] * len(mbs) if len(mbs) > 1 else table[k][s] for k, s, mbs, _ in tasks]
        slices = schedule.rules.slices
        if slices == 1:
            return [table[k][s] * (len(mbs) * size if mbs else 1) for k, s, mbs, _ in tasks]
        grows = self._growing(schedule)
        return [
            (table[k][s] + grows[k][s] * ((2 * (mbs[0] % slices) + 1) / slices - 1)) * size if mbs else table[k][s]
            for k, s, mbs, _ in tasks
        ]

    def _growing(self, schedule: Schedule) -> dict[Kind, tuple[float, ...]]:
        """Return, per kind and stage, the part of a full micro-batch's time that grows along the sequence."""
        zeros = (0.0,) * self.stages
        again = tuple(
            r * a / f if f else 0.0 for r, a, f in zip(self.recompute, self.attention, self.forward, strict=True)
        )
        joint = tuple(g * b.input_grad for g, b in zip(self.attention_grad, schedule.backwards, strict=True))
        parts: dict[Kind, tuple[float, ...]] = {"F": self.attention, "R": again, "B": self.attention_grad}
        return {kind: joint if kind in JOINT else parts.get(kind, zeros) for kind in KINDS}


_LEFT_OUT = tuple(f.name for f in fields(CostTable) if f.default == ())


def _per_link(values: tuple[float, ...], stages: int) -> Comm:
    """Return one value per stage, or a number if all are equal.

    Raises:
        ScheduleError: there is neither one value per stage nor one per link.
    """
    if len(values) not in (stages, stages - 1):
        raise ScheduleError(
            "costs", f"comm has {len(values)} values for {stages} stages", f"give 1, {stages - 1} or {stages} values"
        )
    values += values[-1:] if len(values) < stages else ()
    return values if len(set(values)) > 1 else values[0] if values else 0.0


# The latency of messages: which dependencies are messages and which links they cross.
#
# Link s connects stages s and s+1; activations and gradients cross it with the same latency. A message between stages
# that are not neighbours (a skip connection) goes directly to its device, but is no faster than the slowest network on
# its way. It therefore takes the largest latency of the links between its stages. The sum would charge for stops that
# the message does not make, and ``comm = 1`` would no longer mean that every message takes 1. Where the edges of the
# stage graph carry tensors of their own, each has its own latency.


Comm = float | tuple[float, ...] | Mapping[tuple[int, int], float]
"""Latency of every link, or a tuple: value s is the latency between stages s and s+1 (the last value is unused), or the
latency of each edge of the stage graph."""
Delays = list[list[dict[int, float]]]
"""``delays[replica][stage][other]`` is the time from the end of a task of ``other`` to the earliest start of a task of
``stage`` that depends on it."""


def latency(comm: Comm, a: int, b: int) -> float:
    """Return the latency of a message between stages ``a`` and ``b`` on different devices, in either direction.

    It is 0 within a stage: replicas of a stage exchange all-reduces, whose cost includes their messages.

    >>> latency((1.0, 5.0, 2.0, 0.0), 1, 2), latency((1.0, 5.0, 2.0, 0.0), 3, 0), latency(1.0, 0, 9)
    (5.0, 5.0, 1.0)
    """
    if a == b:
        return 0.0
    if isinstance(comm, Mapping):
        return comm[min(a, b), max(a, b)]
    return max(comm[min(a, b) : max(a, b)]) if isinstance(comm, tuple) else comm


def latencies(comm: Comm) -> tuple[float, ...]:
    """Return all values of ``comm``."""
    if isinstance(comm, Mapping):
        return tuple(comm.values())
    return comm if isinstance(comm, tuple) else (comm,)


def each_latency(comm: Comm, change: Callable[[float], float]) -> Comm:
    """Return ``comm`` with every latency changed."""
    if isinstance(comm, Mapping):
        return {edge: change(value) for edge, value in comm.items()}
    return tuple(map(change, comm)) if isinstance(comm, tuple) else change(comm)


def delays(placement: Sequence[Sequence[int]], graph: StageGraph, comm: Comm) -> Delays | None:
    """Return the delay of every possible dependency; None if all delays are 0.

    Stages on one device pass results without a message, whatever ``comm`` is; where they are sharded, those that no
    edge joins wait for one another too (``deps``).
    """
    if comm == 0:
        return None
    by_edge = {(a, b): latency(comm, a, b) for a, b in graph.edges}
    held: dict[int, set[int]] = {}
    for row in placement:
        for s, device in enumerate(row):
            held.setdefault(device, set()).add(s)
    result: Delays = []
    for row in placement:
        own: list[dict[int, float]] = [dict.fromkeys(held[row[s]], 0.0) for s in range(graph.stages)]
        for (a, b), time in by_edge.items():
            own[a][b] = own[b][a] = time if row[a] != row[b] else 0.0
        result.append(own)
    return result
