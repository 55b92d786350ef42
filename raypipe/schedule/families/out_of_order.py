"""Out-of-order backprop on a pipeline: weight gradients need only the incoming gradient, so they can wait.

All three schedules state two rules: W needs only the incoming gradient, and stage 0 computes no input gradient.
"""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.greedy import Policy, order_greedily, ring, whole_step
from raypipe.schedule.ir import Rules, Schedule, StageGraph, Task
from raypipe.schedule.kinds import Kind
from raypipe.schedule.shape import Shape

RULES = Rules(w_dep="grad", skip_first_b=True)


def blocks(shape: Shape) -> tuple[int, ...]:
    """Device of each stage where neighbouring stages share one."""
    return tuple(s // shape.chunks for s in range(shape.devices * shape.chunks))


def model_parallel(shape: Shape, costs: CostTable) -> Schedule:
    """One micro-batch at a time through all devices, joint backwards: nothing overlaps.

    Takes N times the sum of all tasks (and the messages).

    Source: OOO backprop, section 5 (cross-layer model parallelism), Figure 5 (a).
    """
    placement = blocks(shape)
    rows: list[list[Task]] = [[] for _ in range(shape.devices)]
    for m in range(shape.microbatches):
        for stage, device in enumerate(placement):
            rows[device].append(Task("F", stage, (m,)))
        for stage in reversed(range(len(placement))):
            rows[placement[stage]].append(Task("BW", stage, (m,)))
    return Schedule(
        name="model-parallel", placement=(placement,), orders=tuple(map(tuple, rows)),
        microbatches=shape.microbatches, graph=StageGraph.chain(len(placement)), rules=RULES,
    )  # fmt: skip


def fast_forward(shape: Shape, costs: CostTable) -> Schedule:
    """Gradient fast-forwarding (OOO-Pipe1): forwards, then input gradients as soon as they can, W's in between.

    Neighbouring stages share a device. Eight stages on two devices, one micro-batch, unit costs: 19.

    Source: OOO backprop, section 5, Figures 5 (b) and 13 (b).
    """
    return _ordered("fast-forward", blocks(shape), shape, costs, ("F", "B", "W"))


def modulo(shape: Shape, costs: CostTable) -> Schedule:
    """Fast-forwarding plus modulo allocation (OOO-Pipe2): stage s on device s mod D, input gradients first.

    Each stage hands its gradient to the next device and can compute its W at once. Eight stages on two devices, one
    micro-batch, unit costs: 16.

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
