"""Orders that their papers write down: GPipe and breadth-first, 1F1B and what is made of it.

1F1B (DAPPLE) also has an interleaved form, two asynchronous ones without a flush on several versions of the weights
(PipeDream, PipeDream-2BW), and two with recomputation moved off the critical path (Merak).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.kinds import BW
from raypipe.schedule.passes.backward import add_recompute
from raypipe.schedule.shape import Shape


def forward_ids(shape: Shape) -> list[int]:
    """Return all ids: micro-batch by micro-batch, each from its first slice to its last."""
    return list(range(shape.microbatches * shape.slices))


def returning_ids(shape: Shape) -> list[int]:
    """Return all ids, micro-batch by micro-batch, each from its last slice to its first.

    >>> returning_ids(Shape(devices=1, microbatches=2, slices=3))
    [2, 1, 0, 5, 4, 3]
    """
    k = shape.slices
    return [m * k + i for m in range(shape.microbatches) for i in reversed(range(k))]


def gpipe(shape: Shape, costs: CostTable) -> Schedule:
    """Run all micro-batches forward, then all backward, with one stage per device.

    With even costs, the makespan is (N + D - 1)(F + BW). Every device holds N activations. With k slices of even cost,
    it is (Nk + D - 1)(F + BW)/k in the same memory.

    Source: Huang et al. 2019, arXiv:1811.06965; as a baseline in Chimera section 2. Slices: Li et al. 2021 (TeraPipe),
    arXiv:2102.07988.
    """
    depth, slices = shape.devices, shape.slices
    orders = [
        [Task("F", s, (m,)) for m in forward_ids(shape)] + [Task(BW, s, (m,)) for m in returning_ids(shape)]
        for s in range(depth)
    ]
    return Schedule.of_chain("gpipe", [range(depth)], orders, shape.microbatches * slices, Rules(slices=slices))


def breadth_first(shape: Shape, costs: CostTable) -> Schedule:
    """Run all micro-batches through one stage before the next; V stages per device, stage s on device s mod D.

    With even costs and N >= D, the makespan is (N + (D-1)/V)(F + BW), where F and BW are the times of all V chunks of a
    device. A stage's micro-batches are contiguous, so that sharded parameters are gathered once per pass. Every device
    holds N*V activations of a chunk.

    Source: Lamy-Poirier 2022 (breadth-first pipeline parallelism), arXiv:2211.05953, section 4.
    """
    depth, count, chunks = shape.devices, shape.microbatches, shape.chunks
    orders = []
    for d in range(depth):
        stages = range(d, depth * chunks, depth)
        forwards = [Task("F", s, (m,)) for s in stages for m in range(count)]
        backwards = [Task(BW, s, (m,)) for s in reversed(stages) for m in range(count)]
        orders.append(tuple(forwards + backwards))
    return Schedule.of_chain("bfs", [[s % depth for s in range(depth * chunks)]], orders, count)


def alternate(forwards: list[Task], backwards: list[Task], ahead: int) -> list[Task]:
    """Return ``ahead`` forwards, then alternating forwards and backwards, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for k, backward in enumerate(backwards):
        order += forwards[ahead + k : ahead + k + 1]
        order.append(backward)
    return order


def one_f_one_b(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B with one stage per device; stage s warms up with D - 1 - s forwards.

    With even costs, the makespan is (N + D - 1)(F + BW). Stage s holds min(D - s, N) activations.

    With k slices, a stage warms up with k - 1 more forwards, so that the first backward, of a micro-batch's last slice,
    has all it needs. Stage s then holds min(D - s + k - 1, Nk) slices, each 1/k of an activation, and with slices of
    even cost the makespan is (Nk + D - 1)(F + BW)/k.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Fan et al. 2021 (DAPPLE). Slices: Sun et al. 2024
    (Seq1F1B), arXiv:2406.03488.
    """
    depth, slices = shape.devices, shape.slices
    orders = []
    for s in range(depth):
        forwards = [Task("F", s, (m,)) for m in forward_ids(shape)]
        backwards = [Task(BW, s, (m,)) for m in returning_ids(shape)]
        orders.append(tuple(alternate(forwards, backwards, depth - 1 - s + slices - 1)))
    return Schedule.of_chain("1f1b", [range(depth)], orders, shape.microbatches * slices, Rules(slices=slices))


def interleaved(shape: Shape, costs: CostTable) -> Schedule:
    """Run interleaved 1F1B: V stages per device, stage s on device s mod D, in rounds of D micro-batches.

    With even costs and D dividing N, the makespan is (N + (D-1)/V)(F + BW), where F and BW are the times of all V
    chunks of a device, and device d holds at most 2(D-1-d) + (V-1)D + 1 activations of a chunk. For other N, there are
    floor(N/D) rounds of about equal size: with a short last round, a device could wait for a forward that comes after
    its own backward in the order.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    depth, slices, chunks = shape.devices, shape.slices, shape.chunks
    if chunks == 1:
        return one_f_one_b(shape, costs)
    where, count = [[s % depth for s in range(depth * chunks)]], shape.microbatches * slices
    return Schedule.of_chain(
        "interleaved-1f1b", where, [order for order, _ in interleaved_orders(shape)], count, Rules(slices=slices)
    )


def interleaved_orders(shape: Shape, more: int = 0) -> list[tuple[list[Task], int]]:
    """Return the orders of interleaved 1F1B and how many forwards each begins with, ``more`` than it takes."""
    depth, chunks, count = shape.devices, shape.chunks, shape.microbatches * shape.slices
    there, back = forward_ids(shape), returning_ids(shape)
    rounds = _rounds(count, max(1, count // depth))
    orders = []
    for d in range(depth):
        up = [c * depth + d for c in range(chunks)]
        forwards = [Task("F", s, (there[m],)) for r in rounds for s in up for m in r]
        backwards = [Task(BW, s, (back[m],)) for r in rounds for s in reversed(up) for m in r]
        at = {task[1:]: k for k, task in enumerate(forwards)}
        ahead = max(at[task[1:]] - k for k, task in enumerate(backwards))  # so that each comes after its own forward
        ahead = min(len(forwards), 2 * (depth - 1 - d) + ahead + more)
        orders.append((alternate(forwards, backwards, ahead), ahead))
    return orders


def _rounds(count: int, rounds: int) -> list[range]:
    """Divide 0..count-1 into ``rounds`` ranges, the longer ones first."""
    base, extra = divmod(count, rounds)
    starts = [r * base + min(r, extra) for r in range(rounds + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def pipedream(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B with an update after every micro-batch; a backward uses the weights of its forward.

    The tasks are those of N micro-batches of 1F1B. ``versions.unroll`` joins steps to the continuous order, in which
    devices idle only in the first fill and the last drain. Stage s keeps D - s versions of its weights.

    Source: Narayanan et al. 2019 (PipeDream), sections 3.2 and 3.3; Chimera section 2.
    """
    _check_full(shape, "each device keeps up to D in flight")
    return replace(one_f_one_b(shape, costs), name="pipedream", versions="stash")


def pipedream_2bw(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B without a flush, with an update per N >= D micro-batches: w(t+1) = w(t) - lr * grad(w(t-1)).

    Source: Narayanan et al. 2021 (PipeDream-2BW), arXiv:2006.09503, section 3.1; Chimera section 2.
    """
    _check_full(shape, "forwards would meet a third version of the weights")
    return replace(one_f_one_b(shape, costs), name="pipedream-2bw", versions="2bw")


def _check_full(shape: Shape, why: str) -> None:
    if shape.microbatches < shape.devices:
        raise ScheduleError(
            "microbatches",
            f"{shape.microbatches} micro-batches a step on {shape.devices} devices; {why}",
            f"use {shape.devices} or more",
        )


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
        order.insert(order.index(Task(BW, depth - 2, (0,))), order.pop(third))
        orders[depth - 2] = tuple(order)
        schedule = schedule.with_orders(orders)
    return add_recompute(schedule, "early", range(depth - 1))
