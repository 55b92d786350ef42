"""1F1B (DAPPLE): warm up, then one forward for one backward, then drain; and its interleaved form."""

from __future__ import annotations

import itertools

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.shape import Shape


def alternate(forwards: list[Task], backwards: list[Task], ahead: int) -> list[Task]:
    """``ahead`` forwards, then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for k, backward in enumerate(backwards):
        order += forwards[ahead + k : ahead + k + 1]
        order.append(backward)
    return order


def one_f_one_b(shape: Shape, costs: CostTable) -> Schedule:
    """One stage a device; stage s runs D - 1 - s forwards ahead of its first backward.

    Even costs take (N + D - 1)(F + BW); stage s holds min(D - s, N) activations.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Fan et al. 2021 (DAPPLE).
    """
    depth, count = shape.devices, shape.microbatches
    orders = []
    for s in range(depth):
        forwards = [Task("F", s, (m,)) for m in range(count)]
        backwards = [Task("BW", s, (m,)) for m in range(count)]
        orders.append(tuple(alternate(forwards, backwards, depth - 1 - s)))
    return Schedule(
        name="1f1b", placement=(tuple(range(depth)),), orders=tuple(orders), microbatches=count,
        graph=StageGraph.chain(depth),
    )  # fmt: skip


def interleaved(shape: Shape, costs: CostTable) -> Schedule:
    """V stages a device, stage s on device s mod D; forwards go round the devices D micro-batches at a time.

    Even costs take (N + (D-1)/V)(F + BW), F and BW being the time of all V chunks of a device, where D divides N.
    Device d then holds at most 2(D-1-d) + (V-1)D + 1 activations of a chunk. Other N go in floor(N/D) rounds of
    about equal size: a short last round would let a device wait for a forward that sits behind its own backward.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    depth, count, chunks = shape.devices, shape.microbatches, shape.chunks
    if chunks == 1:
        return one_f_one_b(shape, costs)
    rounds = _rounds(count, max(1, count // depth))
    ahead = (chunks - 1) * len(rounds[0])
    orders = []
    for d in range(depth):
        up = [c * depth + d for c in range(chunks)]
        forwards = [Task("F", s, (m,)) for r in rounds for s in up for m in r]
        backwards = [Task("BW", s, (m,)) for r in rounds for s in reversed(up) for m in r]
        orders.append(tuple(alternate(forwards, backwards, 2 * (depth - 1 - d) + ahead)))
    return Schedule(
        name="interleaved-1f1b", placement=(tuple(s % depth for s in range(depth * chunks)),), orders=tuple(orders),
        microbatches=count, graph=StageGraph.chain(depth * chunks),
    )  # fmt: skip


def _rounds(count: int, rounds: int) -> list[range]:
    """0..count-1 cut into ``rounds`` runs, the longer ones first."""
    base, extra = divmod(count, rounds)
    starts = [r * base + min(r, extra) for r in range(rounds + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]
