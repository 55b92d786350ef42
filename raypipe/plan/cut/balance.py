"""Deal a row of pieces (layers, sub-graphs) to stages so that the slowest device is as fast as can be.

Pieces keep their order; stages are runs of them, none empty, of any length. The deal is exact where a device holds
one stage or two (``line``, ``two_a_device``: a V or ring of two chunks, Chimera's two directions). Elsewhere it is the
best that moving borders finds, and ``Balance.bound`` says how much better one could be at most.

Source: Lai et al. 2023 (Merak), section 4.2, asks for such a deal and leaves open how to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypipe.errors import SpecError
from raypipe.plan.cut.borders import measure, move_borders, needs
from raypipe.plan.cut.folded import deal_folded, deal_ring, fitting_folded, fitting_ring
from raypipe.plan.cut.line import bottlenecks, deal_line, leanest_line
from raypipe.plan.cut.runs import Memory, Runs, live_microbatches

__all__ = ["Balance", "Memory", "balance", "bottlenecks", "contiguous_split", "line_of", "live_microbatches"]

Placement = Sequence[Sequence[int]]
"""Device of every stage, one row per replica of the pipeline."""
Fitting = Callable[[Runs, int], list[int] | None]
Deal = Callable[[Runs, Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class Balance:
    """Pieces dealt to stages."""

    starts: tuple[int, ...]
    """First piece of each stage; the first is 0."""
    pieces: int
    stage_cost: tuple[float, ...]
    device_cost: tuple[float, ...]
    """Per device, the cost of a micro-batch; with several rows of placement, each device's average over them."""
    device_bytes: tuple[float, ...]
    """Per device; empty where memory was not asked about."""
    bound: float
    """No deal has a faster slowest device."""

    def stage(self, number: int) -> range:
        """The pieces of a stage."""
        return range(self.starts[number], (*self.starts, self.pieces)[number + 1])

    @property
    def stages(self) -> tuple[range, ...]:
        """The pieces of every stage."""
        return tuple(self.stage(s) for s in range(len(self.starts)))

    @property
    def proven(self) -> bool:
        """Whether no deal is better."""
        return max(self.device_cost) <= self.bound * (1 + 1e-9)


def balance(
    costs: Sequence[float], placement: Placement, memory: Memory | None = None, where: str = "parallel.stages"
) -> Balance:
    """Deal pieces of these costs to the stages of a placement.

    First the slowest device is made as fast as can be, then the slowest stage; ties are broken by evenness.

    Args:
        costs: of each piece, in any unit.
        placement: ``line_of(D)``, or a V, a ring, or two directions as ``auto.placements.placed`` makes them.
        memory: what fits on a device.
        where: what to blame in errors.

    Raises:
        SpecError: more stages than pieces, or no deal that fits the memory; says how much would do.
    """
    stages = len(placement[0])
    check_stages(stages, len(costs), where)
    runs = Runs.of(costs, memory)
    groups = _groups(placement)
    starts, bound = _solve(runs, stages, groups)
    if starts is None:
        least_bytes = leanest_line(runs, stages) if len(groups) == stages else float("nan")
        enough = f"; the leanest needs {least_bytes / 2**20:.0f} MiB" if least_bytes == least_bytes else ""
        raise SpecError(
            where, f"no cut into {stages} stages fits the {runs.limit / 2**20:.0f} MiB of a device{enough}",
            "use more stages, smaller micro-batches, or recompute",
        )  # fmt: skip
    return _result(runs, starts, placement, bound)


def pinned(
    costs: Sequence[float], placement: Placement, starts: Sequence[int], memory: Memory | None = None
) -> Balance:
    """A given deal, to compare the best one with."""
    return _result(Runs.of(costs, memory), list(starts), placement, 0.0)


def line_of(stages: int) -> tuple[tuple[int, ...], ...]:
    """One stage a device, one replica."""
    return (tuple(range(stages)),)


def contiguous_split(costs: Sequence[float], parts: int) -> list[int]:
    """Where parts 1, 2, ... begin, for the smallest largest sum (then the smallest sum of squares) of ``parts`` runs.

    >>> contiguous_split([1, 1, 1, 1, 4], 3)
    [2, 4]
    """
    starts = deal_line(Runs.of(costs), parts)
    assert starts is not None  # without memory, whatever has as many pieces as parts can be dealt
    return starts[1:]


def check_stages(stages: int, pieces: int, where: str = "parallel.stages") -> None:
    """Refuse more stages than there is to deal."""
    if not 1 <= stages <= pieces:
        raise SpecError(where, f"{stages} stages for a model of {pieces} layers", f"use 1 to {pieces}")


def _groups(placement: Placement) -> list[tuple[int, ...]]:
    """The stages of each device, devices that hold the same ones once."""
    held: dict[int, list[int]] = {}
    for row in placement:
        for stage, device in enumerate(row):
            held.setdefault(device, []).append(stage)
    return sorted({tuple(sorted(stages)) for stages in held.values()})


def _solve(runs: Runs, stages: int, groups: list[tuple[int, ...]]) -> tuple[list[int] | None, float]:
    """The starts, None if nothing fits, and a bound on the cost of the slowest group."""
    half = stages // 2
    if all(len(group) == 1 for group in groups):
        starts = deal_line(runs, stages)
        return starts, measure(runs, starts, groups)[1] if starts else float("inf")
    exact = _exact(groups, half) if stages % 2 == 0 else None
    if exact is not None:
        fitting, deal = exact
        start = move_borders(runs, deal_line(Runs.of(runs.costs), stages) or [], groups)
        found = start if measure(runs, start, groups)[0] <= 0 else fitting(runs, stages)
        if found is None:
            return None, float("inf")
        starts = deal(runs, found)
        return move_borders(runs, starts, groups), measure(runs, starts, groups)[1]
    starts = move_borders(runs, deal_line(Runs.of(runs.costs), stages) or [], groups)
    if measure(runs, starts, groups)[0] > 0:
        return None, float("inf")
    times = max(map(len, groups)) / stages * float(runs.before[-1])
    return starts, max(max(runs.costs), times if len({len(g) for g in groups}) == 1 else 0.0)


def _exact(groups: list[tuple[int, ...]], half: int) -> tuple[Fitting, Deal] | None:
    """The exact method for these stages on each device, if there is one."""
    pairs = {(group[0], group[-1]) for group in groups if len(group) == 2}
    if len(pairs) != len(groups):
        return None
    if pairs == {(s, 2 * half - 1 - s) for s in range(half)}:
        return fitting_folded, deal_folded
    return (fitting_ring, deal_ring) if pairs == {(s, s + half) for s in range(half)} else None


def _result(runs: Runs, starts: list[int], placement: Placement, bound: float) -> Balance:
    ends = [*starts[1:], runs.count]
    stage_cost = tuple(float(runs.cost[a, b]) for a, b in zip(starts, ends, strict=True))
    rows = len(placement)
    devices = sorted({device for row in placement for device in row})
    held = [tuple(s for row in placement for s, d in enumerate(row) if d == device) for device in devices]
    return Balance(
        tuple(starts), runs.count, stage_cost, tuple(sum(stage_cost[s] for s in stages) / rows for stages in held),
        tuple(needs(runs, starts, held)), bound / rows,
    )  # fmt: skip
