"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.shape import Shape


def gpipe(shape: Shape, costs: CostTable) -> Schedule:
    """One stage a device; every micro-batch forward, then every micro-batch backward.

    Even costs take (N + D - 1)(F + BW); every device holds N activations.

    Source: Huang et al. 2019, arXiv:1811.06965; as a baseline in Chimera section 2.
    """
    depth, count = shape.devices, shape.microbatches
    orders = [[Task(kind, s, (m,)) for kind in ("F", "BW") for m in range(count)] for s in range(depth)]
    return Schedule(
        name="gpipe", placement=(tuple(range(depth)),), orders=tuple(map(tuple, orders)), microbatches=count,
        graph=StageGraph.chain(depth),
    )  # fmt: skip
