"""Chimera: bidirectional pipelines whose bubbles fill each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BW
from raypipe.schedule.passes.backward import add_recompute
from raypipe.schedule.shape import Shape

Slotted = tuple[int, int, Task]
"""(device, slot, task)."""


def check_bidirectional(shape: Shape) -> None:
    """Check that the depth D is even and that f, half the number of pipelines, divides D/2.

    Raises:
        ScheduleError: a check fails; the fix names numbers that work.
    """
    depth, f = shape.devices, shape.pipelines // 2
    if depth % 2:
        nearby = f"{depth - 1} or {depth + 1}" if depth > 1 else "2"
        raise ScheduleError("devices", f"{depth} devices; the two directions need an even number", f"use {nearby}")
    if (depth // 2) % f:
        good = ", ".join(str(2 * k) for k in range(1, depth // 2 + 1) if (depth // 2) % k == 0)
        raise ScheduleError(
            "pipelines", f"{2 * f} pipelines: f = {f} does not divide D/2 = {depth // 2}", f"use one of {good}"
        )


def placement(depth: int, pipelines: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each replica's stages: replica 2i is down pipeline i, replica 2i+1 its reverse.

    Down pipeline i puts stage s on device (i*D/f + s) mod D.

    >>> placement(4, 2)
    ((0, 1, 2, 3), (3, 2, 1, 0))
    """
    rows: list[tuple[int, ...]] = []
    for i in range(pipelines // 2):
        down = tuple((i * depth // (pipelines // 2) + s) % depth for s in range(depth))
        rows += [down, down[::-1]]
    return tuple(rows)


def shares(count: int, pipelines: int) -> list[int]:
    """Return the number of micro-batches per pipeline, as even as possible; the first pipelines take the surplus."""
    return [count // pipelines + (p < count % pipelines) for p in range(pipelines)]


def chain_slots(depth: int, m: int, s: int) -> tuple[int, int]:
    """Return the slots of the forward and the backward of a pipeline's m-th micro-batch on stage s.

    This is 1F1B in steady state, which uses every other slot. On a device, the slots of the two directions differ in
    parity, so they never collide.

    >>> [chain_slots(4, m, 3) for m in range(2)]
    [(3, 4), (5, 6)]
    """
    return s + 2 * m, 2 * depth - 1 - s + 2 * m


def basic_unit(depth: int, pipelines: int, groups: list[tuple[int, ...]], first_slot: int) -> Iterator[Slotted]:
    """Yield a unit of at most D forwards, each of a group of micro-batches, with one backward per micro-batch.

    The groups are assigned to the pipelines in contiguous shares, as even as possible. A forward takes one slot, and
    the backwards of its group share one slot, which is divided into parts here.

    Source: Li and Hoefler 2021 (Chimera), sections 3.1 and 3.6; 3.5 for groups of two.
    """
    where = placement(depth, pipelines)
    parts = max(map(len, groups))
    begin = 0
    for replica, share in enumerate(shares(len(groups), pipelines)):
        for m, group in enumerate(groups[begin : begin + share]):
            for s in range(depth):
                forward, backward = chain_slots(depth, m, s)
                device = where[replica][s]
                yield device, first_slot + parts * forward, Task("F", s, group, replica)
                for part, mb in enumerate(group):
                    yield device, first_slot + parts * backward + part, Task(BW, s, (mb,), replica)
        begin += share


def chimera(shape: Shape, costs: CostTable) -> Schedule:
    """Concatenate basic units of D forwards; each starts in the bubbles at the end of the one before.

    ``direct``: a forward carries one micro-batch. The makespan is 2N + D - 2 for F = BW and N a multiple of D, and
    K(4D-2) + D - 2 for BW = 2F and K = N/D units. Devices hold D/2 + 1 to D activations.

    ``doubling``: a forward carries two micro-batches, each with its own recomputation and backward (R waits for the
    gradient). The makespan is u(9D-2) + 2(D-2) for a pair's F = 2, BW + R = 3 and u = N/2D units. Remaining
    micro-batches form a smaller unit, in pairs if more than D remain.

    ``halving``: a forward carries the two halves of a micro-batch, whose backwards run one by one; ids are halves. The
    makespan is 3N + D - 2 for BW = 2F. Activations are as in direct.

    Source: Li and Hoefler 2021 (Chimera), sections 3.1, 3.5 (concatenation), 3.6 (2f pipelines).
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    if shape.concat == "direct":
        groups: list[tuple[int, ...]] = [(m,) for m in range(count)]
    elif shape.concat == "halving":
        groups = [(2 * m, 2 * m + 1) for m in range(count)]
    else:
        remaining = count % (2 * depth)
        paired = count - remaining if remaining <= depth else count - count % 2
        groups = [*((m, m + 1) for m in range(0, paired, 2)), *((m,) for m in range(paired, count))]
    slotted: list[Slotted] = []
    slot = 0
    for first in range(0, len(groups), depth):
        unit = groups[first : first + depth]
        slotted += basic_unit(depth, shape.pipelines, unit, slot)
        slot += 2 * depth * max(map(len, unit))
    schedule = Schedule.of_chain(
        "chimera",
        placement(depth, shape.pipelines),
        merge_by_slot(depth, slotted),
        sum(map(len, groups)),
        size=Fraction(1, 2) if shape.concat == "halving" else None,
    )
    return add_recompute(schedule, "late") if shape.concat == "doubling" else schedule


def tight(shape: Shape, costs: CostTable) -> Schedule:
    """Order Chimera's placement for BW = 2F: the makespan is 3N + 2(D-2) for even N >= D.

    Micro-batches alternate between the two directions, and each moves one stage every three slots, forward and back.
    On a device, the two directions' forwards and backwards then fill six slots exactly. There is no bubble between
    warm-up and drain, whereas direct concatenation has some in every unit. A device holds at most D activations.

    The slots are raypipe's own, found by searching periodic patterns with BW = 2F; the placement is that of Li and
    Hoefler 2021 (Chimera), section 3.1.
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    where = placement(depth, 2)
    slotted: list[Slotted] = []
    for m in range(count):
        replica, start = m % 2, 6 * (m // 2)
        for s in range(depth):
            device = where[replica][s]
            slotted.append((device, start + 3 * s, Task("F", s, (m,), replica)))
            slotted.append((device, start + 3 * (2 * depth - 1 - s) - 2, Task(BW, s, (m,), replica)))
    return Schedule.of_chain("chimera-tight", where, merge_by_slot(depth, slotted), count)


def merge_by_slot(devices: int, slotted: Iterable[Slotted]) -> tuple[tuple[Task, ...], ...]:
    """Order each device's tasks by slot; tasks that depend on each other must have increasing slots.

    Sorting by slot cannot deadlock then: the earliest slot not yet run never waits for a later one.
    """
    rows: list[list[tuple[int, int, Task]]] = [[] for _ in range(devices)]
    for n, (device, slot, task) in enumerate(slotted):
        rows[device].append((slot, n, task))
    return tuple(tuple(task for _, _, task in sorted(row, key=lambda x: x[:2])) for row in rows)


def gems(shape: Shape, costs: CostTable) -> Schedule:
    """Alternate micro-batches between the directions; the next one's forward overlaps the current one's backward.

    With even costs, the makespan is (D-1)F + N(F + D*BW). A device holds one activation.

    Source: Jain et al. 2020 (GEMS); as a baseline in Chimera section 2.
    """
    check_bidirectional(shape)
    depth, count = shape.devices, shape.microbatches
    where = placement(depth, 2)
    orders: list[list[Task]] = [[] for _ in range(depth)]
    for m in range(count):
        for stage, device in enumerate(where[m % 2]):
            orders[device] += [Task("F", stage, (m,), m % 2), Task(BW, stage, (m,), m % 2)]
    return Schedule.of_chain("gems", where, orders, count)
