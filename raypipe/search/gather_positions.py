"""The search for gather positions: between once per step and once per micro-batch, with the order, within memory.

Placements of several kinds are timed on every order with the one clock, the two ends among them, from the one that
keeps its links busy least; those that do so for longer than the best step so far takes need no timing. So what the
search finds is never slower than either end.

A placement is windows of gathered weights: which stages to keep gathered, and how early to gather, within memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule, Sharding, Task
from raypipe.schedule.kinds import READS_WEIGHTS
from raypipe.schedule.passes.shard import Window, Windows, place, policy_windows
from raypipe.schedule.sharding import LiveShards, shard_peaks
from raypipe.schedule.verify import check_links, check_ran
from raypipe.schedule.walk import walk
from raypipe.search.budget import Budget

_Key = tuple[int, int]
"""(stage, replica)"""


def fewest_gathers(order: Sequence[Task], sizes: Sequence[float], room: float) -> Windows | None:
    """Return windows with as few gathers as memory allows: the stage whose next use is farthest goes first.

    For stages of one size no choice has fewer (Belady 1966, A study of replacement algorithms). A stage is resharded
    after its last use before it is dropped, not when its place is needed.

    Args:
        order: a device's tasks, without AG, RS and FREE.
        sizes: of each stage's weights.
        room: of the device, in the same unit.

    Returns:
        The windows; None if a stage alone takes more than there is.
    """
    reads = [(k, (t.stage, t.replica)) for k, t in enumerate(order) if t.kind in READS_WEIGHTS]
    following: list[int] = [0] * len(reads)
    seen: dict[_Key, int] = {}
    for n in range(len(reads) - 1, -1, -1):
        following[n] = seen.get(reads[n][1], len(order))
        seen[reads[n][1]] = reads[n][0]
    result: dict[_Key, list[Window]] = {}
    kept: dict[_Key, int] = {}  # the position of its next use
    used = 0.0
    for (k, key), after in zip(reads, following, strict=True):
        size = sizes[key[0]]
        if key in kept:
            result[key][-1] = result[key][-1]._replace(last=k)
        else:
            while used + size > room * (1 + 1e-12) and kept:
                farthest = max(kept, key=kept.__getitem__)
                del kept[farthest]
                used -= sizes[farthest[0]]
            if used + size > room * (1 + 1e-12):
                return None
            used += size
            result.setdefault(key, []).append(Window(k, k, k))
        kept[key] = after
    return result


def once_within(schedule: Schedule, device: int, sizes: Sequence[float], room: float) -> Windows:
    """Return windows that gather once per step as many stages as there is room for, and others at every use.

    Args:
        schedule: without AG, RS and FREE.
        device: whose windows.
        sizes: of each stage's weights.
        room: of the device, in the same unit; the largest of the other stages must fit beside those kept.
    """
    once = policy_windows(schedule, device, "step")
    often = policy_windows(schedule, device, "microbatch")
    kept: set[_Key] = set()
    for key in sorted(once):
        more = kept | {key}
        beside = max((sizes[s] for s, r in once if (s, r) not in more), default=0.0)
        if sum(sizes[s] for s, _ in more) + beside <= room * (1 + 1e-12):
            kept = more
    return {key: (once if key in kept else often)[key] for key in once}


def gathered_early(
    windows: Windows, ahead: int, sizes: Sequence[float], room: float, used: Sequence[float]
) -> Windows | None:
    """Issue gathers up to ``ahead`` tasks early, the sooner needed first, where memory allows.

    Args:
        windows: of one device.
        ahead: tasks between issue and first use, at most.
        sizes: of each stage's weights.
        room: of the device, in the same unit.
        used: what full gradients take of it, per task (``gradients_used``).

    Returns:
        The windows; None if they do not fit even without prefetching.
    """
    held = list(used)
    limit = room * (1 + 1e-12)
    for key, own in windows.items():
        for first, last, _ in own:
            for k in range(first, last + 1):
                held[k] += sizes[key[0]]
    if max(held, default=0.0) > limit:
        return None
    result: dict[_Key, list[Window]] = {key: list(own) for key, own in windows.items()}
    every = sorted((window.first, key, n) for key, own in windows.items() for n, window in enumerate(own))
    for first, key, n in every:
        size, at = sizes[key[0]], first
        least = max(first - ahead, result[key][n - 1].last + 1 if n else 0)
        while at > least and held[at - 1] + size <= limit:
            at -= 1
            held[at] += size
        result[key][n] = Window(first, result[key][n].last, at)
    return result


def gradients_used(scattered: Schedule, device: int, sizes: Sequence[float]) -> list[float]:
    """Return what full gradients take while each task of a device runs.

    Args:
        scattered: with its RS tasks.
        device: whose order.
        sizes: of each stage's gradients.
    """
    live, result = LiveShards(scattered, sizes, sizes), list[float]()
    for task in scattered.orders[device]:
        before = live.gradients
        live.task(task)
        if task.mbs:
            result.append(max(before, live.gradients))
    return result


AHEAD = (1_000_000, 4, 1, 0)
"""Tasks by which gathers are issued early, at most; the first one is as early as memory allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGathers:
    """The best placement that the search found."""

    schedule: Schedule
    """With its AG, FREE and RS tasks."""
    makespan: float
    policy: str
    """What it came from: an end (``step``, ``once`` within memory, ``microbatch``), ``unit`` or ``fewest``."""
    order: int
    """Which of the orders it is."""
    tried: int
    """Placements timed; others cannot be faster, by how long they keep a link busy."""


class _Choice(NamedTuple):
    """A placement whose gathers have no positions yet."""

    bound: float
    """No less than the time that some device's link is busy."""
    order: int
    unit: int | None
    """Micro-batches that share a reduce-scatter."""
    policy: str
    windows: Sequence[Windows]


@no_collection()
def search_gathers(
    orders: Sequence[Schedule],
    rooms: Sequence[Sequence[float]],
    costs: CostTable,
    sizes: Sequence[float],
    *,
    sharding: Sharding,
    units: Sequence[int] = (),
    budget: Budget | None = None,
) -> FoundGathers:
    """Find where to gather, reshard and reduce-scatter, and on which of several orders of one step.

    Args:
        orders: schedules of the same placement and stages, without bookkeeping; the best of them is kept.
        rooms: per order and device, what gathered weights and full gradients may take beside everything else.
        costs: with ``gather`` and ``reduce_scatter``.
        sizes: of each stage's weights (and gradients), in the unit of ``rooms``.
        sharding: levels, and groups of copies.
        units: micro-batches of scheduling units to try besides 1 and the whole step.
        budget: ends the search once something was found, with the most promising placements timed; None: no end.

    Raises:
        ScheduleError: no placement fits.
    """
    bare = [replace(order, sharding=sharding) for order in orders]
    floor = [_makespan(order, costs) for order in bare]
    choices = [c for n in range(len(bare)) for c in _choices(n, bare[n], rooms[n], costs, sizes, units, floor[n])]
    best, result, chosen = float("inf"), None, None
    tried = 0
    for choice in sorted(choices, key=lambda c: c.bound):
        if result is not None and budget is not None and budget.left <= 0:
            break
        order, room = bare[choice.order], rooms[choice.order]
        scattered = place(order, sharding, [{} for _ in room], choice.unit)
        used = [gradients_used(scattered, d, sizes) for d in range(order.devices)]
        seen: list[Sequence[Windows]] = []
        for ahead in AHEAD:
            if choice.bound >= best * (1 - 1e-9):
                break
            early = [gathered_early(own, ahead, sizes, room[d], used[d]) for d, own in enumerate(choice.windows)]
            windows = [own for own in early if own is not None]
            if len(windows) < order.devices or windows in seen:
                continue
            seen.append(windows)
            schedule = place(order, sharding, windows, choice.unit)
            if any(peak > r * (1 + 1e-9) for peak, r in zip(shard_peaks(schedule, sizes), room, strict=True)):
                continue
            tried += 1
            makespan = _makespan(schedule, costs)
            if makespan < best * (1 - 1e-12):
                best, result, chosen = makespan, schedule, choice
    if result is None or chosen is None:
        raise ScheduleError(
            "gathers", "no placement of gathers fits the memory", "leave more room: smaller stages, or fewer of them"
        )
    return FoundGathers(schedule=result, makespan=best, policy=chosen.policy, order=chosen.order, tried=tried)


def _choices(
    n: int,
    bare: Schedule,
    room: Sequence[float],
    costs: CostTable,
    sizes: Sequence[float],
    units: Sequence[int],
    floor: float,
) -> Iterator[_Choice]:
    """Every placement that may fit the room; ``floor`` is the makespan without any collective."""
    assert bare.sharding is not None
    devices = range(bare.devices)
    fixed: list[tuple[str, list[Windows | None]]] = [
        ("step", [policy_windows(bare, d, "step") for d in devices]),
        ("once", [once_within(bare, d, sizes, room[d]) for d in devices]),
        ("microbatch", [policy_windows(bare, d, "microbatch") for d in devices]),
    ]
    for u in (*units, bare.microbatches):
        fixed.append(("unit", [policy_windows(bare, d, "unit", u) for d in devices]))
    for unit in dict.fromkeys((None, *units, 1)):
        scattered = place(bare, bare.sharding, [{} for _ in devices], unit)
        used = [max(gradients_used(scattered, d, sizes), default=0.0) for d in devices]
        busy = [sum(costs.reduce_scatter[t.stage] for t in order if t.kind == "RS") for order in scattered.orders]
        if any(u > r * (1 + 1e-9) for u, r in zip(used, room, strict=True)):
            continue
        parts = _rooms(room, used, sizes)
        fewest: list[tuple[str, list[Windows | None]]] = [
            ("fewest", [fewest_gathers(bare.orders[d], sizes, own[k]) for d, own in enumerate(parts)]) for k in range(4)
        ]
        for policy, windows in (*fixed, *fewest):
            whole = [own for own in windows if own is not None]
            if len(whole) == bare.devices:
                links = (
                    b + sum(costs.gather[s] * len(w) for (s, _), w in own.items())
                    for b, own in zip(busy, whole, strict=True)
                )
                yield _Choice(max(floor, *links), n, unit, policy, whole)


def _rooms(room: Sequence[float], used: Sequence[float], sizes: Sequence[float]) -> list[tuple[float, ...]]:
    """Rooms to play with: all of it, what the fullest gradients leave, and each less one stage that comes early."""
    return [(r, r - u, r - max(sizes), r - u - max(sizes)) for r, u in zip(room, used, strict=True)]


def _makespan(schedule: Schedule, costs: CostTable) -> float:
    graph = link(schedule)
    check_links(graph)
    done = walk(graph, costs.durations(schedule, graph.tasks), costs.comm)
    check_ran(graph, done)
    return max(done.end)
