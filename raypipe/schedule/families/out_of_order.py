"""Out-of-order backprop on a pipeline: weight gradients can run late, because no other stage waits for them.

In all three schedules, W depends only on the incoming gradient, and stage 0 computes no input gradient.
"""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.greedy import Policy, order_greedily, ring, whole_step
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.kinds import BW, Kind
from raypipe.schedule.shape import Shape

RULES = Rules(w_dep="grad", skip_first_b=True)


def blocks(shape: Shape) -> tuple[int, ...]:
    """Return the device of each stage; neighbouring stages share a device."""
    return tuple(s // shape.chunks for s in range(shape.devices * shape.chunks))


def model_parallel(shape: Shape, costs: CostTable) -> Schedule:
    """Run one micro-batch at a time through all devices, with joint backwards and no overlap.

    The makespan is N times the sum of all tasks and messages.

    Source: OOO backprop, section 5 (cross-layer model parallelism), Figure 5 (a).
    """
    placement = blocks(shape)
    rows: list[list[Task]] = [[] for _ in range(shape.devices)]
    for m in range(shape.microbatches):
        for stage, device in enumerate(placement):
            rows[device].append(Task("F", stage, (m,)))
        for stage in reversed(range(len(placement))):
            rows[placement[stage]].append(Task(BW, stage, (m,)))
    return Schedule.of_chain("model-parallel", [placement], rows, shape.microbatches, RULES)


def fast_forward(shape: Shape, costs: CostTable) -> Schedule:
    """Gradient fast-forwarding (OOO-Pipe1): run forwards, then input gradients as early as possible, W in between.

    Neighbouring stages share a device. Eight stages on two devices take 19 for one micro-batch and unit costs.

    Source: OOO backprop, section 5, Figures 5 (b) and 13 (b).
    """
    return _ordered("fast-forward", blocks(shape), shape, costs, ("F", "B", "W"))


def modulo(shape: Shape, costs: CostTable) -> Schedule:
    """Fast-forwarding with modulo allocation (OOO-Pipe2): stage s is on device s mod D, and input gradients run first.

    Each stage sends its gradient to another device and can compute its W at once. Eight stages on two devices take 16
    for one micro-batch and unit costs.

    Source: OOO backprop, section 5, Figures 5 (c) and 13 (c).
    """
    return _ordered("modulo", ring(shape), shape, costs, ("B", "F", "W"))


def _ordered(
    name: str, placement: tuple[int, ...], shape: Shape, costs: CostTable, kinds: tuple[Kind, ...]
) -> Schedule:
    policy = Policy(kinds=kinds, key=lambda t: (t.mbs[0], t.stage if t.kind == "F" else -t.stage))
    found = order_greedily(whole_step(name, placement, shape.microbatches, RULES), costs, policy)
    if found is None:  # cannot be: this policy has no limits
        raise ScheduleError(name, "no order found", "report this")
    return found.schedule
