"""Insert the gathers, reshards and reduce-scatters of sharded data parallelism into any synchronous schedule.

A *window* is a stretch of a device's order in which a stage's weights stay gathered: one AG before it, one FREE after
it. A policy says which tasks share a window:

    step         one window per stage and step (FSDP2 without reshard_after_forward: gather once)
    unit         one for the forwards and one for the backwards of a stage in a scheduling unit of U micro-batches, or
                 one for both if no other stage's task lies between: ZeroPP's 2V - 1 per unit; with one unit, BFS-PP's
    microbatch   one for every forward and one for every backward (FSDP2 as it is: FS-1F1B's 2N per stage)

Gathers occupy the link, not the device. Issued ``ahead`` tasks early, they run beside those tasks (prefetch), which
takes the memory of one more gathered stage meanwhile.

Source: ZeroPP, section 3.3.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from raypipe.errors import ScheduleError, check_known
from raypipe.schedule.ir import ZERO_LEVELS, Schedule, Sharding, Task
from raypipe.schedule.kinds import READS_WEIGHTS, SHARDED, WEIGHT_GRADIENTS

Gather = Literal["step", "unit", "microbatch"]


class Window(NamedTuple):
    """A stretch of a device's order, both ends included, in which one stage replica is gathered."""

    first: int
    last: int
    issued: int
    """Position before which its AG is issued, at most ``first``."""


Windows = Mapping[tuple[int, int], Sequence[Window]]
"""(stage, replica) -> its windows on its device, in order; positions count the tasks of the bare order."""


def shard(
    schedule: Schedule,
    level: int | Sequence[int],
    *,
    gather: Gather = "unit",
    unit: int | None = None,
    ahead: int = 1,
    copies: int = 1,
    group: int | None = None,
) -> Schedule:
    """Shard the stages of a schedule over its data-parallel copies; what it had of AG, RS and FREE is placed anew.

    Args:
        schedule: a synchronous schedule without AR and U tasks (those come after, and wait for RS).
        level: ZeRO level of all stages, 0 to 3, or one per stage.
        gather: which tasks of a stage of level 3 share a gather. From level 2 on, gradients are reduce-scattered as
            often: after the step's, the unit's or the micro-batch's last weight gradient. Stages of levels 1 and 2
            gather once, at the head of the order, what the last updates made; level 1 reduces once.
        unit: micro-batches of a scheduling unit, U; all of them by default.
        ahead: tasks of the device before its first use at which a gather is issued.
        copies: data-parallel copies that ``schedule`` holds (``passes.replicate``; it may also come after).
        group: consecutive copies that share one set of shards, so that the others replicate them; all by default.

    Raises:
        ScheduleError: an unknown level or policy, or a schedule with weight versions.
    """
    check_known(ScheduleError, "gather", gather, get_args(Gather))
    if unit is not None and unit < 1:
        raise ScheduleError("unit", f"{unit} micro-batches a unit", "use a whole number >= 1")
    bare, sharding = _bare(schedule, level, copies, group)
    if sharding is None:
        return bare
    each = (unit or bare.microbatches) if gather == "unit" else 1
    result = [issued_early(policy_windows(bare, d, gather, unit), ahead) for d in range(bare.devices)]
    return place(bare, sharding, result, None if gather == "step" else each)


def _bare(
    schedule: Schedule, level: int | Sequence[int], copies: int, group: int | None
) -> tuple[Schedule, Sharding | None]:
    levels = (level,) * schedule.stages if isinstance(level, int) else tuple(level)
    if len(levels) != schedule.stages or not set(levels) <= set(ZERO_LEVELS):
        raise ScheduleError("zero", f"{level} for {schedule.stages} stages", "use 0, 1, 2 or 3, or one per stage")
    # Shards divide what the optimizer updates, and every holder of a frozen stage has all of it.
    levels = tuple(n if b.weight_grad else 0 for n, b in zip(levels, schedule.backwards, strict=True))
    if schedule.versions != "flush" and any(levels):
        raise ScheduleError(
            "zero",
            f"{schedule.name} keeps older versions of its weights, which shards do not have",
            "use a synchronous schedule, or zero: 0",
        )
    bare = schedule.without(SHARDED)
    sharding = Sharding(levels=levels, copies=copies, group=group) if any(levels) else None
    return replace(bare, sharding=sharding), sharding


def policy_windows(schedule: Schedule, device: int, gather: Gather, unit: int | None = None) -> Windows:
    """Return the windows of each stage replica on a device, for one of the policies; arguments as ``shard``."""
    order = schedule.orders[device]
    copy = schedule.microbatches // (schedule.sharding.copies if schedule.sharding is not None else 1)
    each = {"step": schedule.microbatches, "unit": unit or copy, "microbatch": 1}[gather]
    halves = schedule.pairs
    reads = [(k, t) for k, t in enumerate(order) if t.kind in READS_WEIGHTS]
    ranges: dict[tuple[int, int], dict[tuple[int, bool], Window]] = {}
    positions: dict[tuple[int, int], list[int]] = {}
    for k, task in reads:
        key = (task.stage, task.replica)
        positions.setdefault(key, []).append(k)
        part = (0, False) if gather == "step" else (task.mbs[0] % copy // each, task.kind != "F")
        parts = ranges.setdefault(key, {})
        begin = k - (task in schedule.joined)  # a window holds whole pairs
        first = parts[part].first if part in parts else begin
        parts[part] = Window(first, begin + (task in halves), first)
    every = [k for k, _ in reads]

    def read_elsewhere(key: tuple[int, int], after: int, until: int) -> bool:
        counts = [bisect_left(at, until) - bisect_right(at, after) for at in (every, positions[key])]
        return counts[0] > counts[1]

    result: dict[tuple[int, int], list[Window]] = {}
    for key, parts in ranges.items():
        windows: list[Window] = []
        before: tuple[int, bool] | None = None
        for part, window in sorted(parts.items(), key=lambda item: item[1]):
            overlaps = bool(windows) and window.first <= windows[-1].last
            turns = before == (part[0], False) and part[1] and gather == "unit"
            if overlaps or (turns and not read_elsewhere(key, windows[-1].last, window.first)):
                windows[-1] = windows[-1]._replace(last=max(windows[-1].last, window.last))
            else:
                windows.append(window)
            before = part
        result[key] = windows
    return result


def issued_early(windows: Windows, ahead: int) -> Windows:
    """Issue every gather ``ahead`` tasks before its first use, but after the stage's window before."""
    result: dict[tuple[int, int], list[Window]] = {}
    for key, own in windows.items():
        free_from = 0
        for window in own:
            result.setdefault(key, []).append(window._replace(issued=max(window.first - ahead, free_from)))
            free_from = window.last + 1
    return result


def place(schedule: Schedule, sharding: Sharding, windows: Sequence[Windows], unit: int | None) -> Schedule:
    """Insert AG, FREE and RS for given windows.

    Args:
        schedule: without AG, RS and FREE.
        sharding: level of each stage.
        windows: per device, of the stages of level 3; others are ignored.
        unit: micro-batches whose gradients share a reduce-scatter, where gradients are sharded; None: the step's.
    """
    rows = []
    for d, order in enumerate(schedule.orders):
        frees: dict[int, list[Task]] = {}
        gathers: dict[int, list[tuple[int, Task]]] = {}
        for (stage, replica), own in windows[d].items():
            level = sharding.levels[stage]
            if level in (1, 2) and own:
                gathers.setdefault(0, []).append((own[0].first, Task("AG", stage, (), replica)))
            for first, last, issued in own if level == 3 else ():
                gathers.setdefault(issued, []).append((first, Task("AG", stage, (), replica)))
                frees.setdefault(last + 1, []).append(Task("FREE", stage, (), replica))
        scatters = _scatters(schedule, sharding, d, unit)
        for k in (k for k, task in enumerate(order) if task in schedule.joined):  # not between the halves of a pair
            gathers.setdefault(k - 1, []).extend(gathers.pop(k, ()))
            frees.setdefault(k + 1, []).extend(frees.pop(k, ()))
        row: list[Task] = []
        for k in range(len(order) + 1):
            # A gather is waited for sooner than a reduce-scatter issued at the same moment.
            row += [*frees.get(k, ()), *(task for _, task in sorted(gathers.get(k, ()))), *scatters.get(k, ())]
            row += order[k : k + 1]
        rows.append(row)
    return schedule.with_orders(rows, sharding=sharding)


def _scatters(schedule: Schedule, sharding: Sharding, device: int, unit: int | None) -> dict[int, list[Task]]:
    """Position -> the RS tasks issued there: after the last weight gradient of each unit."""
    copy = schedule.microbatches // sharding.copies
    ends: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    order = schedule.orders[device]
    for k, task in enumerate(order):
        if task.kind in WEIGHT_GRADIENTS and sharding.levels[task.stage]:
            once = unit is None or sharding.levels[task.stage] == 1
            part = 0 if once or unit is None else task.mbs[0] % copy // unit
            own = ends.setdefault((task.stage, task.replica), {})
            own[part] = (own[part][0] if part in own else k, k)
    result: dict[int, list[Task]] = {}
    for (stage, replica), parts in ends.items():
        spans = sorted(parts.values())
        until = -1
        for (_, last), following in zip(spans, [*spans[1:], (len(order), 0)], strict=True):
            until = max(until, last)
            if following[0] > until:  # units whose weight gradients mix share one reduce-scatter
                result.setdefault(until + 1, []).append(Task("RS", stage, (), replica))
    for replica, row in enumerate(schedule.placement):  # one without a micro-batch takes part all the same
        for stage, home in enumerate(row):
            if home == device and sharding.levels[stage] and (stage, replica) not in ends:
                result.setdefault(len(order), []).append(Task("RS", stage, (), replica))
    return result


def forwards_alone(schedule: Schedule) -> Schedule:
    """Return a sharded schedule with only its forwards, as validation runs them: every stage gathered once for all."""
    bare = schedule.with_orders([t for t in order if t.kind == "F"] for order in schedule.orders)
    if bare.sharding is None:
        return bare
    windows = [issued_early(policy_windows(bare, d, "step"), 1) for d in range(bare.devices)]
    placed = place(bare, bare.sharding, windows, None)
    return placed.without({"RS"})
