"""Split the joint backward into B and W, and join them again."""

from __future__ import annotations

from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import JOINT


@no_collection()
def split_backward(schedule: Schedule) -> Schedule:
    """Replace every BW by B followed directly by W, or by W alone if the stage has no B (``ir.backwards``).

    The stage before then waits for B only, so no task runs later than before.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 2; OOO backprop section 3.
    """
    backwards = schedule.backwards
    orders: list[list[Task]] = []
    for order in schedule.orders:
        new: list[Task] = []
        for task in order:
            if task.kind not in JOINT:
                new.append(task)
                continue
            if backwards[task.stage].input_grad:
                new.append(task._replace(kind="B"))
            new.append(task._replace(kind="W"))
        orders.append(new)
    return schedule.with_orders(orders)


def fuse_backward(schedule: Schedule, everywhere: bool = False) -> Schedule:
    """Join each B with its W into one BW, if the W is next in the device's order.

    Args:
        schedule: any valid schedule.
        everywhere: also join a W that comes later, at the position of its B. This is valid, because a W needs only its
            B, and only updates and all-reduces wait for the W.
    """
    orders: list[list[Task]] = []
    for order in schedule.orders:
        weights = {t[1:]: k for k, t in enumerate(order) if t.kind == "W"}
        new: list[Task] = []
        joined: set[int] = set()
        for k, task in enumerate(order):
            if k in joined:
                continue
            w = weights.get(task[1:]) if task.kind == "B" else None
            if w is not None and (w == k + 1 or (everywhere and w > k)):
                joined.add(w)
                task = task._replace(kind="BW")
            new.append(task)
        orders.append(new)
    return schedule.with_orders(orders)
