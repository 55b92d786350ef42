"""How far a device may run into a step while the update before it is pending.

With clipping by global norm, an update can only be committed once every device's gradients are complete. Meanwhile, a
synchronous schedule may run the forwards at the head of the next step, and run them again if the update is reverted
(zero bubble's optimistic step, Qi et al. 2024, section 4). All devices know the set of these forwards, and it is closed
under dependencies, so that none of them waits for a device that has stopped at the end of its head.

PipeDream-2BW trains step t on the previous version of the weights, so nothing has to run again: all tasks before the
first forward of step t + 1 may run before the update.
"""

from __future__ import annotations

from raypipe.schedule.deps import transfers
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING


def tasks_ahead(schedule: Schedule) -> list[int]:
    """Return, per device, how many tasks at the head of its order may run while the last step's update is pending.

    The time is linear in these tasks, unless the heads of many devices have to be shortened repeatedly.
    """
    if schedule.versions == "2bw":
        return [_before_newest(schedule, device) for device in range(schedule.devices)]
    counts: list[int] = []
    where: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, micro-batch) -> device and position of its forward
    for device, order in enumerate(schedule.orders):
        count = next((i for i, task in enumerate(order) if task.kind != "F"), len(order))
        where.update({(t.stage, mb): (device, i) for i, t in enumerate(order[:count]) for mb in t.mbs})
        counts.append(count)
    taken = transfers(schedule.graph, schedule.rules).taken

    def misses(stage: int, mb: int) -> bool:
        device, position = where.get((stage, mb), (0, len(schedule.orders[0])))
        return position >= counts[device]

    shortened = True
    while shortened:
        shortened = False
        for device, order in enumerate(schedule.orders):
            for i, task in enumerate(order[: counts[device]]):
                if any(misses(source, mb) for _, source in taken.get(("F", task.stage), ()) for mb in task.mbs):
                    counts[device], shortened = i, True
                    break
    return counts


def _before_newest(schedule: Schedule, device: int) -> int:
    """Return where a device first needs the newest weights, or changes gradients that the last update reads."""
    order = schedule.orders[device]
    for i, task in enumerate(order):
        if task.kind in BOOKKEEPING or (task.kind == "F" and task.mbs[0] >= schedule.microbatches):
            return i
    return len(order)
