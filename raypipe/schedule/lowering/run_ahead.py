"""How far a device may run into a step while the update before it may still be undone or has yet to be made.

With clipping by global norm an update is only certain once every device's gradients are complete. Synchronous
schedules may run the forwards at the head of the next step meanwhile, and run them again should the update be undone
(zero bubble's optimistic step, Qi et al. 2024, section 4). The set is the same for all devices to see and closed: such
a forward reads only what others of them made, so none of them ever waits for a device that has stopped at its end.

PipeDream-2BW trains step t on the version before the newest, so nothing is run again: everything before the first
forward of step t + 1 may come before the update.
"""

from __future__ import annotations

from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING


def tasks_ahead(schedule: Schedule) -> list[int]:
    """Per device, how many tasks at the head of its order may run before the last step's update is certain.

    Linear in those tasks, unless many devices have to stop short of their own forwards.
    """
    if schedule.versions == "2bw":
        return [_before_newest(schedule, device) for device in range(schedule.devices)]
    counts: list[int] = []
    where: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, micro-batch) -> device and position of its forward
    for device, order in enumerate(schedule.orders):
        count = next((i for i, task in enumerate(order) if task.kind != "F"), len(order))
        where.update({(t.stage, mb): (device, i) for i, t in enumerate(order[:count]) for mb in t.mbs})
        counts.append(count)
    inputs = schedule.graph.inputs()

    def misses(stage: int, mb: int) -> bool:
        device, position = where.get((stage, mb), (0, len(schedule.orders[0])))
        return position >= counts[device]

    shortened = True
    while shortened:
        shortened = False
        for device, order in enumerate(schedule.orders):
            for i, task in enumerate(order[: counts[device]]):
                if any(misses(source, mb) for source in inputs[task.stage] for mb in task.mbs):
                    counts[device], shortened = i, True
                    break
    return counts


def _before_newest(schedule: Schedule, device: int) -> int:
    """Where a device first needs the newest weights, or touches the gradients of the update before."""
    order = schedule.orders[device]
    return next(
        (
            i for i, task in enumerate(order)
            if task.kind in BOOKKEEPING or (task.kind == "F" and task.mbs[0] >= schedule.microbatches)
        ),
        len(order),
    )  # fmt: skip
