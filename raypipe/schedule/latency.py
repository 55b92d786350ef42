"""How long messages take: the one place that knows which dependencies are messages, and which links they cross.

Link s joins stage s and stage s+1; activations go down it, gradients come up it, both at its latency. A message
between stages that aren't neighbours (a skip connection) goes straight to its device and isn't passed on from stage to
stage, so that it pays no link twice, but it is no faster than the slowest of the networks on its way: it takes the
greatest latency of the links between its stages. Their sum would charge it for stops that it doesn't make, and would
give ``comm = 1`` another meaning than that every message takes 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.schedule.ir import StageGraph

Comm = float | tuple[float, ...]
"""Latency of every link, or one per stage: value s of the link between stages s and s+1 (the last one has no use)."""
Delays = list[list[dict[int, float]]]
"""``delays[replica][stage][other]``: from the end of a task of ``other`` to the earliest start of one of ``stage``
that needs it."""


def latency(comm: Comm, a: int, b: int) -> float:
    """Of a message between stages ``a`` and ``b`` on different devices, in either direction.

    Nothing between tasks of one stage: what its replicas exchange is an all-reduce, whose cost has its messages.

    >>> latency((1.0, 5.0, 2.0, 0.0), 1, 2), latency((1.0, 5.0, 2.0, 0.0), 3, 0), latency(1.0, 0, 9)
    (5.0, 5.0, 1.0)
    """
    if a == b:
        return 0.0
    return max(comm[min(a, b) : max(a, b)]) if isinstance(comm, tuple) else comm


def delays(placement: Sequence[Sequence[int]], graph: StageGraph, comm: Comm) -> Delays | None:
    """The delay of every dependency there can be; None where all are 0.

    Stages on one device hand their results over without a message, whatever ``comm`` says.
    """
    if comm == 0:
        return None
    by_edge = {(a, b): latency(comm, a, b) for a, b in graph.edges}
    found: Delays = []
    for row in placement:
        own: list[dict[int, float]] = [{s: 0.0} for s in range(graph.stages)]
        for (a, b), time in by_edge.items():
            own[a][b] = own[b][a] = time if row[a] != row[b] else 0.0
        found.append(own)
    return found
