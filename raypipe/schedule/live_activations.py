"""Held by devices: live activations, which follow from the order alone, and weight versions of steps in a row."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedule.ir import Backward, Schedule, Task, grid
from raypipe.schedule.kinds import WEIGHT_GRADIENTS


def recomputed_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the (stage, micro-batch) pairs that have an R task."""
    return {(t.stage, mb) for t in schedule.tasks() if t.kind == "R" for mb in t.mbs}


def births(task: Task, recomputed: set[tuple[int, int]]) -> int:
    """Return the number of activations that become alive when the task starts; recomputed ones do at their R."""
    if task.kind == "F":
        return sum((task.stage, mb) not in recomputed for mb in task.mbs) if recomputed else len(task.mbs)
    return len(task.mbs) if task.kind == "R" else 0


def deaths(task: Task, backwards: Sequence[Backward]) -> int:
    """Return the number of activations freed by the task; B frees none where weight gradients still need them.

    Args:
        task: of any kind.
        backwards: ``schedule.backwards``.
    """
    return len(task.mbs) if task.kind in backwards[task.stage].last else 0


def live_counts(schedule: Schedule) -> list[list[int]]:
    """Return ``[device][position]``: the activations alive while that task runs, counted per micro-batch id."""
    again, backwards = recomputed_pairs(schedule), schedule.backwards
    rows = []
    for order in schedule.orders:
        alive, row = 0, []
        for task in order:
            alive += births(task, again)
            row.append(alive)
            alive -= deaths(task, backwards)
        rows.append(row)
    return rows


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return the peak of live activations per device, in units of one stage and full micro-batch.

    An activation is alive from the start of F (of R if recomputed) to the end of the stage's last task for it: W or BW,
    B in a frozen stage, F in one without a backward. An id that stands for half a micro-batch counts one half.
    """
    return tuple(float(max(row, default=0) * schedule.size) for row in live_counts(schedule))


def in_flight(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return, per (stage, device), the peak number of micro-batches between their F and the end of their backward."""
    most: dict[tuple[int, int], int] = {}
    for device, order in enumerate(schedule.orders):
        now: dict[int, int] = {}
        for task in order:
            here = task.stage, device
            now[task.stage] = now.get(task.stage, 0) + len(task.mbs) * (task.kind == "F")
            most[here] = max(most.get(here, 0), now[task.stage])
            now[task.stage] -= deaths(task, schedule.backwards)
    return most


def check_memory(schedule: Schedule, limit: float) -> None:
    """Check that no device holds more than ``limit`` activations.

    Raises:
        ScheduleError: a device exceeds the limit; the first task above it is marked.
    """
    for device, row in enumerate(live_counts(schedule)):
        for position, alive in enumerate(row):
            if alive * schedule.size > limit:
                raise ScheduleError(
                    f"device {device}, position {position}, task {schedule.orders[device][position]}",
                    f"holds {float(alive * schedule.size):g} activations, the limit is {limit:g}\n"
                    + grid(schedule, (device, position)),
                    f"{schedule.name} needs {max(peak_activations(schedule)):g}; raise the limit, or choose a schedule "
                    "or shape that holds fewer",
                )


# Steps one after another, and the weight versions that they need: one if synchronous, more in PipeDream's.


def unroll(schedule: Schedule, steps: int) -> Schedule:
    """Return ``steps`` steps one after another; the micro-batch ids of step k start at k*N.

    The orders of a synchronous schedule are concatenated, without all-reduces and updates, because a task graph can
    have these only once. An asynchronous schedule never flushes: the backwards that drain one step alternate with the
    forwards that fill the next, which gives PipeDream's continuous 1F1B.
    """
    count = schedule.microbatches
    rows: list[list[Task]] = []
    for order in schedule.orders:
        row: list[Task] = []
        for k in range(steps):
            step = [t._replace(mbs=tuple(k * count + m for m in t.mbs)) for t in order if t.mbs]
            row = row + step if schedule.versions == "flush" else _merge_drain(row, step)
        rows.append(row)
    joined = frozenset(
        t._replace(mbs=tuple(k * count + m for m in t.mbs)) for k in range(steps) for t in schedule.joined
    )
    return schedule.with_orders(rows, microbatches=steps * count, joined=joined)


def _merge_drain(done: list[Task], step: list[Task]) -> list[Task]:
    """Alternate the backwards at the end of ``done`` with the forwards at the start of ``step``."""
    tail = len(done)
    while tail and done[tail - 1].kind != "F":
        tail -= 1
    head = 0
    while head < len(step) and step[head].kind == "F":
        head += 1
    drain = done[tail:]
    if not done or len(drain) < 2 or not head:
        return done + step
    # The first drain backward pairs with the forward before it; every later one is preceded by a new forward.
    merged = [*done[:tail], drain[0]]
    for k, backward in enumerate(drain[1:]):
        merged += [*step[k : k + 1], backward] if k < head - 1 else [backward]
    taken = min(len(drain) - 1, head - 1)
    return merged + step[taken:]


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return, per device, the largest number of versions of one stage's weights alive at once.

    It is 1 for ``flush`` and 2 for ``2bw``, the current and the previous version (Narayanan et al. 2021,
    arXiv:2006.09503). ``stash`` updates after every backward and keeps, for each micro-batch in flight, the version
    that its forward used (Narayanan et al. 2019, PipeDream, section 3.3). Its versions are counted in steady state: D -
    s on stage s, given enough micro-batches.
    """
    if schedule.versions == "flush":
        return (1,) * schedule.devices
    if schedule.versions == "2bw":
        return (2,) * schedule.devices
    peaks, backwards = [], schedule.backwards
    for order in unroll(schedule, 3).orders:
        current: dict[tuple[int, int], int] = {}
        flying: dict[tuple[int, int], dict[int, int]] = {}
        peak = 1
        for kind, stage, mbs, replica in order:
            if not backwards[stage].weight_grad:  # never updated
                continue
            key = (stage, replica)
            stash = flying.setdefault(key, {})
            now = current.setdefault(key, 0)
            if kind == "F":
                stash.update(dict.fromkeys(mbs, now))
                peak = max(peak, len({*stash.values(), now}))
            elif kind in WEIGHT_GRADIENTS:
                peak = max(peak, len({*stash.values(), now}))
                for mb in mbs:
                    stash.pop(mb, None)
                current[key] = now + 1
        peaks.append(peak)
    return tuple(peaks)


def check_versions(schedule: Schedule, limit: int) -> None:
    """Check that no device keeps more than ``limit`` versions of a stage's weights.

    Raises:
        ScheduleError: a device exceeds the limit; it names the device.
    """
    for device, versions in enumerate(weight_versions(schedule)):
        if versions > limit:
            raise ScheduleError(
                f"device {device}",
                f"{schedule.name} keeps {versions} versions of its weights, the limit is {limit}",
                "raise the limit, or use pipedream-2bw (2 versions) or a synchronous schedule (1)",
            )
