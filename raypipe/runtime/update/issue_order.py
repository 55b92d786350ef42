"""The order in which the pieces of a stage's gradients are summed: as a priority queue on their link would serve them.

All members of a process group must issue its collectives in one order, and they see their gradients complete at
slightly different times. So no queue decides while the step runs: from what all members have measured of an earlier
step, each of them computes the same order beforehand, and then issues the pieces in it, each when it is complete. A
queue that the members agree on piece by piece would need a message to all before each, behind the pieces on the link.

Source: Peng et al. 2019 (ByteScheduler) for the queue; Oh et al. 2022 (OOO backprop), section 5.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def prioritised_order(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Return the pieces in the order in which a link sends them that always takes the most urgent complete one.

    Args:
        ready: when each piece is complete, in seconds from any moment; the most urgent piece comes first.
        seconds: how long the link takes for each.

    >>> prioritised_order([3.0, 2.0, 1.0], [0.5, 0.5, 0.5]), prioritised_order([3.0, 2.0, 1.0], [1.0, 1.0, 4.0])
    ([2, 1, 0], [2, 0, 1])
    """
    coming = sorted(range(len(ready)), key=lambda piece: (ready[piece], piece), reverse=True)
    waiting: list[int] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            heapq.heappush(waiting, coming.pop())
        piece = heapq.heappop(waiting)
        order.append(piece)
        now += seconds[piece]
    return order
