"""Windows of gathered weights within a device's memory: which stages to keep gathered, and how early to gather."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import READS_WEIGHTS
from raypipe.schedule.passes.shard import Window, Windows, policy_windows
from raypipe.schedule.sharding import LiveShards

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
    found: dict[_Key, list[Window]] = {}
    kept: dict[_Key, int] = {}  # the position of its next use
    used = 0.0
    for (k, key), after in zip(reads, following, strict=True):
        size = sizes[key[0]]
        if key in kept:
            found[key][-1] = found[key][-1]._replace(last=k)
        else:
            while used + size > room * (1 + 1e-12) and kept:
                farthest = max(kept, key=kept.__getitem__)
                del kept[farthest]
                used -= sizes[farthest[0]]
            if used + size > room * (1 + 1e-12):
                return None
            used += size
            found.setdefault(key, []).append(Window(k, k, k))
        kept[key] = after
    return found


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
    found: dict[_Key, list[Window]] = {key: list(own) for key, own in windows.items()}
    every = sorted((window.first, key, n) for key, own in windows.items() for n, window in enumerate(own))
    for first, key, n in every:
        size, at = sizes[key[0]], first
        least = max(first - ahead, found[key][n - 1].last + 1 if n else 0)
        while at > least and held[at - 1] + size <= limit:
            at -= 1
            held[at] += size
        found[key][n] = Window(first, found[key][n].last, at)
    return found


def gradients_used(scattered: Schedule, device: int, sizes: Sequence[float]) -> list[float]:
    """Return what full gradients take while each task of a device runs.

    Args:
        scattered: with its RS tasks.
        device: whose order.
        sizes: of each stage's gradients.
    """
    live, found = LiveShards(scattered, sizes, sizes), list[float]()
    for task in scattered.orders[device]:
        before = live.gradients
        live.task(task)
        if task.mbs:
            found.append(max(before, live.gradients))
    return found
