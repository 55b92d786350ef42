"""Cut a row of pieces (layers, sub-graphs) into stages: the one cutter of ``raypipe train``, the planner and
``raypipe partition``.

Pieces keep their order; stages are runs of them, none empty, of any length. Two things can be balanced: the stages, so
that the slowest stage is as fast as can be; or the devices, so that the slowest device is. They differ where a device
holds several stages. A slow device bounds a step from below, but an order may also wait for a slow stage: only the
simulator says which cut is faster (``fastest_cut``).

Both are exact where a device holds one stage or two (``exact``: a line; a V or ring of two chunks, Chimera's two
directions). With more stages a device, devices are balanced as well as moving borders can, and ``LayerCut.bound`` says
how much better a cut could be at most.

Source: Lai et al. 2023 (Merak), section 4.2, asks for such a cut and leaves open how to find it.

Moving the borders between stages makes cuts better for placements without an exact method, and evens out ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import SpecError
from raypipe.plan.cut.exact import (
    ROUNDING,
    Memory,
    Runs,
    Table,
    cut_folded,
    cut_line,
    cut_ring,
    fitting_folded,
    fitting_ring,
    leanest_line,
)

Groups = Sequence[tuple[int, ...]]
"""The stages of each device."""
Starts = NDArray[np.int64]
CRITERIA = 5
"""Of a cut; the first that differs decides, smaller is better: memory over the limit, the slowest device, the slowest
stage, and the sums of squares over devices and over stages."""


def move_borders(runs: Runs, starts: Sequence[int], groups: Groups) -> list[int]:
    """Move borders, some neighbouring ones at a time, as long as that makes the cut better (``measure``)."""
    best = np.array(starts)
    better: Starts | None = best
    while better is not None:
        best = better
        better = _first_better(runs, best, groups)
    return [int(start) for start in best]


def _first_better(runs: Runs, starts: Starts, groups: Groups) -> Starts | None:
    """The first of all moves that makes the cut better: neighbouring borders by the same power of two."""
    steps = np.array([sign * 2**k for k in range(runs.count.bit_length()) for sign in (1, -1)])
    key = measure(runs, starts[None], groups)
    upto = np.tri(len(starts), dtype=np.int64)  # [last, k]: whether k <= last
    for first in range(1, len(starts)):
        between = upto[first:] - upto[first - 1]
        cuts = starts + (steps[:, None, None] * between).reshape(-1, len(starts))
        cuts = cuts[(np.diff(cuts, axis=1, append=runs.count) > 0).all(axis=1)]  # no stage is empty
        better = np.flatnonzero(_less(measure(runs, cuts, groups), key[0]))
        if len(better):
            return np.asarray(cuts[better[0]])
    return None


def measure(runs: Runs, cuts: Starts, groups: Groups) -> Table:
    """``CRITERIA`` of cuts, one a row; each is the first piece of every stage."""
    edges = np.hstack([cuts, np.full((len(cuts), 1), runs.count)])
    stage = np.diff(runs.before[edges], axis=1)
    held = np.zeros((stage.shape[1], len(groups)))
    for device, stages in enumerate(groups):
        for s in stages:
            held[s, device] += 1.0
    device = stage @ held
    over = np.maximum(needs(runs, cuts, groups) - runs.limit, 0.0).sum(axis=1)
    return np.column_stack(
        [over, device.max(axis=1), stage.max(axis=1), (device**2).sum(axis=1), (stage**2).sum(axis=1)]
    )


def needs(runs: Runs, cuts: Starts, groups: Groups) -> Table:
    """[cut, device]: bytes that the device needs; no devices where memory does not matter."""
    if runs.weights is None or runs.kept is None:
        return np.empty((len(cuts), 0))
    edges = np.hstack([cuts, np.full((len(cuts), 1), runs.count)])
    a, b = edges[:, :-1], edges[:, 1:]
    each = runs.weights[a, b] + np.array(runs.live) * runs.kept[a, b]
    return np.column_stack([each[:, list(stages)].sum(axis=1) for stages in groups])


def _less(found: Table, key: Table) -> NDArray[np.bool_]:
    """Which rows are smaller than the key, differences by rounding left out."""
    apart = np.abs(found - key) > 10 * ROUNDING * np.maximum(np.abs(found), np.abs(key))
    first = apart.argmax(axis=1)
    rows = np.arange(len(found))
    return np.asarray(apart[rows, first] & (found[rows, first] < key[first]))


Placement = Sequence[Sequence[int]]
"""Device of every stage, one row per replica of the pipeline."""
Balance = Literal["stages", "devices"]
"""What a cut makes as even as can be."""
NOISE = 0.01
"""Cuts whose slowest devices differ by less than this are taken to be equally good: costs are not known better."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """Pieces cut into stages."""

    starts: tuple[int, ...]
    """First piece of each stage; the first is 0."""
    pieces: int
    stage_cost: tuple[float, ...]
    device_cost: tuple[float, ...]
    """Per device, the cost of a micro-batch; with several rows of placement, each device's average over them."""
    device_bytes: tuple[float, ...]
    """Per device; empty where memory was not asked about."""
    bound: float
    """No cut has a faster slowest device; 0 where that was not looked into."""

    @property
    def stages(self) -> tuple[range, ...]:
        """The pieces of every stage."""
        return tuple(map(range, self.starts, (*self.starts[1:], self.pieces)))

    @property
    def slowest(self) -> float:
        """Cost of the slowest device."""
        return max(self.device_cost)

    @property
    def proven(self) -> bool:
        """Return whether no cut has a faster slowest device."""
        return self.slowest <= self.bound * (1 + 1e-9)


def cut_layers(
    costs: Sequence[float],
    placement: Placement,
    memory: Memory | None = None,
    balance: Balance = "devices",
    *,
    slowest_stage: float | None = None,
) -> LayerCut:
    """Cut pieces of these costs into the stages of a placement.

    With ``devices``, first the slowest device is made as fast as can be, then the slowest stage. With ``stages``, the
    slowest stage alone. Ties are broken by evenness, and then in favour of short early stages, which hold more
    micro-batches in flight.

    Args:
        costs: of each piece, in any unit.
        placement: ``line_of(D)``, or a V, a ring, or two directions as ``search.placements.placed`` makes them.
        memory: what fits on a device.
        balance: what to make even.
        slowest_stage: the least possible cost of the slowest stage, where the caller has it from ``bottlenecks``.

    Raises:
        SpecError: more stages than pieces, or no cut that fits the memory; says how much would do.

    >>> cut_layers([1, 1, 1, 1, 4], line_of(3)).starts
    (0, 2, 4)
    >>> cut_layers([1.1] * 8, line_of(3)).starts
    (0, 2, 5)
    """
    stages = len(placement[0])
    check_stages(stages, len(costs))
    runs = Runs.of(costs, memory)
    groups = _groups(placement)
    starts, bound = _solve(runs, stages, groups, balance, slowest_stage)
    if starts is None:
        least_bytes = leanest_line(runs, stages) if len(groups) == stages else float("nan")
        enough = f"; the leanest needs {least_bytes / 2**20:.0f} MiB" if least_bytes == least_bytes else ""
        raise SpecError(
            "parallel.stages",
            f"no cut into {stages} stages fits the {runs.limit / 2**20:.0f} MiB of a device{enough}",
            "use more stages, smaller micro-batches, or recompute",
        )
    return _result(runs, starts, placement, bound)


def fastest_cut(
    costs: Sequence[float], placement: Placement, step_s: Callable[[LayerCut], float], memory: Memory | None = None
) -> LayerCut:
    """Of the cut that balances devices and the one that balances stages, the one with the shorter step.

    Args:
        costs: of each piece, in any unit.
        placement: as for ``cut_layers``.
        step_s: the simulated time of a step with a cut. Not called where both are the same.
        memory: what fits on a device.

    Raises:
        SpecError: as ``cut_layers``.
    """
    best = cut_layers(costs, placement, memory)
    if not shares_devices(placement):
        return best
    starts = cut_layers(costs, placement, balance="stages").starts
    other = given_cut(costs, placement, starts, memory, best.bound)
    fits = memory is None or max(other.device_bytes) <= memory.limit_bytes
    return min(best, other, key=step_s) if fits and starts != best.starts else best


def given_cut(
    costs: Sequence[float],
    placement: Placement,
    starts: Sequence[int],
    memory: Memory | None = None,
    bound: float = 0.0,
) -> LayerCut:
    """Return what a cut that is already there costs, to compare the best one with."""
    return _result(Runs.of(costs, memory), starts, placement, bound * len(placement))


def line_of(stages: int) -> tuple[tuple[int, ...], ...]:
    """One stage a device, one replica."""
    return (tuple(range(stages)),)


def shares_devices(placement: Placement) -> bool:
    """Return whether some device holds several stages, so that balanced stages may leave devices uneven."""
    return any(len(group) > 1 for group in _groups(placement))


def check_stages(stages: int, pieces: int) -> None:
    """Refuse more stages than there are pieces to cut."""
    if not 1 <= stages <= pieces:
        raise SpecError("parallel.stages", f"{stages} stages for a model of {pieces} layers", f"use 1 to {pieces}")


def _groups(placement: Placement) -> list[tuple[int, ...]]:
    """The stages of each device, devices that hold the same ones once."""
    return sorted(set(_held(placement)))


def _held(placement: Placement) -> list[tuple[int, ...]]:
    """The stages of each device, of whatever replica."""
    held: dict[int, list[int]] = {}
    for row in placement:
        for stage, device in enumerate(row):
            held.setdefault(device, []).append(stage)
    return [tuple(sorted(held[device])) for device in sorted(held)]


def _solve(
    runs: Runs, stages: int, groups: Groups, balance: Balance, slowest_stage: float | None
) -> tuple[list[int] | None, float]:
    """The starts, None if nothing fits, and a bound on the cost of the slowest group."""
    if balance == "stages" or all(len(group) == 1 for group in groups):
        starts = cut_line(runs, stages, slowest_stage)
        return starts, 0.0 if starts is None or balance == "stages" else _criteria(runs, starts, groups)[1]
    even = cut_line(Runs.of(runs.costs), stages, slowest_stage) or []
    pairs = {(group[0], group[-1]) for group in groups if len(group) == 2}
    half = stages // 2
    if len(pairs) == len(groups) and 2 * half == stages:
        if pairs == {(s, stages - 1 - s) for s in range(half)}:
            fitting, cut = fitting_folded, cut_folded
        elif pairs == {(s, s + half) for s in range(half)}:
            fitting, cut = fitting_ring, cut_ring
        else:
            return _by_borders(runs, even, groups)
        result = even if _criteria(runs, even, groups)[0] <= 0 else fitting(runs, stages)
        if result is None:
            return None, float("inf")
        starts = cut(runs, result)
        return move_borders(runs, starts, groups), _criteria(runs, starts, groups)[1]
    return _by_borders(runs, even, groups)


def _by_borders(runs: Runs, starts: list[int], groups: Groups) -> tuple[list[int] | None, float]:
    """Where there is no exact method."""
    result = move_borders(runs, starts, groups)
    if _criteria(runs, result, groups)[0] > 0:
        return None, float("inf")
    times = max(map(len, groups)) / len(starts) * float(runs.before[-1])
    return result, max(max(runs.costs), times if len({len(g) for g in groups}) == 1 else 0.0)


def _criteria(runs: Runs, starts: Sequence[int], groups: Groups) -> list[float]:
    result: list[float] = measure(runs, np.array([starts]), groups)[0].tolist()
    return result


def _result(runs: Runs, starts: Sequence[int], placement: Placement, bound: float) -> LayerCut:
    stage_cost = tuple(np.diff(runs.before[[*starts, runs.count]]).tolist())
    held, rows = _held(placement), len(placement)
    return LayerCut(
        tuple(starts),
        runs.count,
        stage_cost,
        tuple(sum(stage_cost[s] for s in stages) / rows for stages in held),
        tuple(needs(runs, np.array([starts]), held)[0].tolist()),
        bound / rows,
    )
