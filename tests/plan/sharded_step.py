"""The clock of a sharded step told once more, without ``deps`` and ``walk``: plans are timed against it."""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Task


def seconds_of_one_copy(schedule: Schedule, costs: CostTable) -> float:
    """When the last task of a data-parallel copy ends, updates left out; the others do the same at the same time.

    Tasks that compute run one after another, collectives beside them, one at a time on the device's link, each issued
    when every task before it in the order has ended that computes. With one set of shards over all copies there are no
    other sums.
    """
    end: dict[tuple[str, int, int, int], float] = {}
    """(kind, stage, micro-batch, replica) -> its end."""
    position = [0] * schedule.devices
    device_free, link_free = [0.0] * schedule.devices, [0.0] * schedule.devices
    gathered: dict[tuple[int, int], float] = {}
    graded: dict[tuple[int, int], float] = {}
    scatters: list[list[float]] = [[] for _ in range(schedule.devices)]
    last = 0.0

    def ready(task: Task, mb: int) -> float | None:
        """When what the task reads is there; None while that is not known."""
        kind, stage, _, replica = task
        recomputed = ("R", stage, mb, replica) in wanted
        needs: list[tuple[tuple[tuple[str, int], ...], float]] = []
        if kind == "F":
            needs += [((("F", stage - 1),), hop(stage - 1, replica))] if stage else []
        elif kind == "R":
            needs += [((("F", stage),), 0.0)]
        elif kind == "W":
            needs += [((("B", stage),), 0.0)]
        else:
            needs += [((("R" if recomputed else "F", stage),), 0.0)]
            if stage < schedule.stages - 1:
                needs += [((("B", stage + 1), ("BW", stage + 1)), hop(stage, replica))]
        at = 0.0
        for kinds, delay in needs:
            known = [end[k, s, mb, replica] for k, s in kinds if (k, s, mb, replica) in end]
            if not known:
                return None
            at = max(at, known[0] + delay)
        return at

    def hop(stage: int, replica: int) -> float:
        row = schedule.placement[replica]
        return costs.links[stage] if row[stage] != row[stage + 1] else 0.0

    wanted = {(t.kind, t.stage, mb, t.replica) for t in schedule.tasks() for mb in t.mbs}
    moved = True
    while moved:
        moved = False
        for d, order in enumerate(schedule.orders):
            while position[d] < len(order):
                task = order[position[d]]
                kind, stage, mbs, replica = task
                key = (stage, replica)
                if kind in ("AG", "RS"):
                    issued = max(device_free[d], link_free[d], graded.pop(key, 0.0) if kind == "RS" else 0.0)
                    link_free[d] = issued + (costs.gather if kind == "AG" else costs.reduce_scatter)[stage]
                    if kind == "AG":
                        gathered[key] = link_free[d]
                    else:
                        scatters[d].append(link_free[d])
                    last = max(last, link_free[d])
                elif mbs:
                    (mb,) = mbs
                    at = ready(task, mb)
                    if at is None:
                        break
                    at = max(at, device_free[d], gathered[key])
                    if kind in ("W", "BW"):
                        if key not in graded and len(scatters[d]) > 1:
                            at = max(at, scatters[d][-2])
                        graded[key] = 0.0
                    device_free[d] = end[kind, stage, mb, replica] = at + costs.by_kind(kind)[stage]
                    if kind in ("W", "BW"):
                        graded[key] = device_free[d]
                    last = max(last, device_free[d])
                position[d] += 1
                moved = True
    assert all(position[d] == len(order) for d, order in enumerate(schedule.orders)), "deadlock"
    return last
