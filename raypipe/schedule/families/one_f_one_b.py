"""1F1B (DAPPLE): warm up, then one forward for one backward, then drain; and its interleaved form."""

from __future__ import annotations

import itertools

from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.sliced import forward_ids, returning_ids
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.shape import Shape


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
        backwards = [Task("BW", s, (m,)) for m in returning_ids(shape)]
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
    count = shape.microbatches * slices
    if chunks == 1:
        return one_f_one_b(shape, costs)
    there, back = forward_ids(shape), returning_ids(shape)
    rounds = _rounds(count, max(1, count // depth))
    orders = []
    for d in range(depth):
        up = [c * depth + d for c in range(chunks)]
        forwards = [Task("F", s, (there[m],)) for r in rounds for s in up for m in r]
        backwards = [Task("BW", s, (back[m],)) for r in rounds for s in reversed(up) for m in r]
        at = {task[1:]: k for k, task in enumerate(forwards)}
        ahead = max(at[task[1:]] - k for k, task in enumerate(backwards))  # so that each comes after its own forward
        orders.append(tuple(alternate(forwards, backwards, 2 * (depth - 1 - d) + ahead)))
    return Schedule.of_chain(
        "interleaved-1f1b", [[s % depth for s in range(depth * chunks)]], orders, count, Rules(slices=slices)
    )


def _rounds(count: int, rounds: int) -> list[range]:
    """Divide 0..count-1 into ``rounds`` ranges, the longer ones first."""
    base, extra = divmod(count, rounds)
    starts = [r * base + min(r, extra) for r in range(rounds + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
