"""Concatenate several steps of a schedule, to study its steady state."""

from __future__ import annotations

from raypipe.schedule.ir import Schedule, Task


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
    return schedule.with_orders(rows, microbatches=steps * count)


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
