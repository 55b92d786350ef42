"""1F1B with recomputation moved off the critical path."""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.one_f_one_b import one_f_one_b
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.passes.recompute import add_recompute
from raypipe.schedule.shape import Shape


def early_recompute(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B whose stages recompute while they wait for the incoming gradient.

    With F = R = 1 and BW = 2, the makespan is 4N + 3(D-1); recomputing on demand takes 4N + 4(D-1).

    Source: Lai et al. 2022 (Merak), section 3.3, combining 1F1B with GPipe's early recomputation.
    """
    return add_recompute(one_f_one_b(shape, costs), "early")


def shifted_critical_path(shape: Shape, costs: CostTable) -> Schedule:
    """Run early recompute, without recomputation on the last stage and one more forward ahead on the stage before it.

    The last stage holds only one activation anyway. Without recomputation it has less work than the others, so the
    critical path moves to the stage before it. The first bubble of that stage takes the third forward; after two
    backwards its order is again that of 1F1B. With F = R = 1, BW = 2 and N >= 3, the makespan is 4N + 3(D-2).

    Source: Lai et al. 2022 (Merak), section 3.3.
    """
    depth = shape.devices
    schedule = one_f_one_b(shape, costs)
    if depth > 1 and shape.microbatches > 2:
        orders = list(schedule.orders)
        order = list(orders[depth - 2])
        third = order.index(Task("F", depth - 2, (2,)))
        order.insert(order.index(Task("BW", depth - 2, (0,))), order.pop(third))
        orders[depth - 2] = tuple(order)
        schedule = schedule.with_orders(orders)
    return add_recompute(schedule, "early", range(depth - 1))
