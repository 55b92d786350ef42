"""GPipe: all forwards, then all backwards; and breadth-first, its form for several stages per device."""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.sliced import forward_ids, returning_ids
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.shape import Shape


def gpipe(shape: Shape, costs: CostTable) -> Schedule:
    """Run all micro-batches forward, then all backward, with one stage per device.

    With even costs, the makespan is (N + D - 1)(F + BW). Every device holds N activations. With k slices of even cost,
    it is (Nk + D - 1)(F + BW)/k in the same memory.

    Source: Huang et al. 2019, arXiv:1811.06965; as a baseline in Chimera section 2. Slices: Li et al. 2021 (TeraPipe),
    arXiv:2102.07988.
    """
    depth, slices = shape.devices, shape.slices
    orders = [
        [Task("F", s, (m,)) for m in forward_ids(shape)] + [Task("BW", s, (m,)) for m in returning_ids(shape)]
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
        backwards = [Task("BW", s, (m,)) for s in reversed(stages) for m in range(count)]
        orders.append(tuple(forwards + backwards))
    return Schedule.of_chain("bfs", [[s % depth for s in range(depth * chunks)]], orders, count)
