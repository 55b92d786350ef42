"""Chimera: bidirectional pipelines whose bubbles fill each other."""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.slots import Slotted, merge
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.shape import Shape


def check_bidirectional(shape: Shape) -> None:
    """Refuse an odd depth, and an f that does not divide D/2.

    Raises:
        ScheduleError: with the numbers that would work.
    """
    depth, f = shape.devices, shape.pipelines // 2
    if depth % 2:
        raise ScheduleError("devices", f"{depth} devices; the two directions need an even number", "use an even number")
    if (depth // 2) % f:
        good = ", ".join(str(2 * k) for k in range(1, depth // 2 + 1) if (depth // 2) % k == 0)
        raise ScheduleError(
            "pipelines", f"{2 * f} pipelines: f = {f} does not divide D/2 = {depth // 2}", f"use one of {good}"
        )


def placement(depth: int, pipelines: int) -> tuple[tuple[int, ...], ...]:
    """Devices of each replica's stages: replica 2i is down pipeline i, replica 2i+1 its reverse.

    Down pipeline i puts stage 0 on device i*D/f and goes round.

    >>> placement(4, 2)
    ((0, 1, 2, 3), (3, 2, 1, 0))
    """
    rows: list[tuple[int, ...]] = []
    for i in range(pipelines // 2):
        down = tuple((i * depth // (pipelines // 2) + s) % depth for s in range(depth))
        rows += [down, down[::-1]]
    return tuple(rows)


def shares(count: int, pipelines: int) -> list[int]:
    """Micro-batches of each pipeline, split as evenly as possible; the first ones take what is left over."""
    return [count // pipelines + (p < count % pipelines) for p in range(pipelines)]


def chain_slots(depth: int, m: int, s: int) -> tuple[int, int]:
    """Slots of the forward and the backward of a pipeline's m-th micro-batch on stage s.

    1F1B at its steady pace, every other slot: on a device the two directions differ in parity, so they share none.

    >>> [chain_slots(4, m, 3) for m in range(2)]
    [(3, 4), (5, 6)]
    """
    return s + 2 * m, 2 * depth - 1 - s + 2 * m


def basic_unit(depth: int, pipelines: int, count: int, first: int, offset: int) -> Iterator[Slotted]:
    """One unit of at most D micro-batches, ids from ``first``, slots from ``offset``; no two share a slot.

    Source: Li and Hoefler 2021 (Chimera), sections 3.1 and 3.6.
    """
    where = placement(depth, pipelines)
    for replica, share in enumerate(shares(count, pipelines)):
        for m in range(share):
            for s in range(depth):
                forward, backward = chain_slots(depth, m, s)
                yield where[replica][s], offset + forward, Task("F", s, (first + m,), replica)
                yield where[replica][s], offset + backward, Task("BW", s, (first + m,), replica)
        first += share


def direct(shape: Shape, costs: CostTable) -> Schedule:
    """Basic units of D micro-batches one after another, each starting in the bubbles at the end of the one before.

    With F = BW and N a multiple of D it takes 2N + D - 2; with BW = 2F, K(4D - 2) + D - 2 for K = N/D units. Devices
    hold D/2 + 1 to D activations. A last unit of fewer than D micro-batches is split evenly over the pipelines.

    Source: Li and Hoefler 2021 (Chimera), sections 3.1 (two pipelines), 3.3 (concatenation), 3.6 (2f pipelines).
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    slotted: list[Slotted] = []
    for k, first in enumerate(range(0, count, depth)):
        slotted += basic_unit(depth, shape.pipelines, min(depth, count - first), first, 2 * depth * k)
    return Schedule(
        name="chimera", placement=placement(depth, shape.pipelines), orders=merge(depth, slotted), microbatches=count,
        graph=StageGraph.chain(depth),
    )  # fmt: skip
