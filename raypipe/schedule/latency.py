"""The latency of messages: which dependencies are messages and which links they cross.

Link s connects stages s and s+1; activations and gradients cross it with the same latency. A message between stages
that are not neighbours (a skip connection) goes directly to its device, but is no faster than the slowest network on
its way. It therefore takes the largest latency of the links between its stages. The sum would charge for stops that the
message does not make, and ``comm = 1`` would no longer mean that every message takes 1. Where the edges of the stage
graph carry tensors of their own, each has its own latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raypipe.schedule.ir import StageGraph

Comm = float | tuple[float, ...] | Mapping[tuple[int, int], float]
"""Latency of every link, or a tuple: value s is the latency between stages s and s+1 (the last value is unused), or the
latency of each edge of the stage graph."""
Delays = list[list[dict[int, float]]]
"""``delays[replica][stage][other]`` is the time from the end of a task of ``other`` to the earliest start of a task of
``stage`` that depends on it."""


def latency(comm: Comm, a: int, b: int) -> float:
    """Return the latency of a message between stages ``a`` and ``b`` on different devices, in either direction.

    It is 0 within a stage: replicas of a stage exchange all-reduces, whose cost includes their messages.

    >>> latency((1.0, 5.0, 2.0, 0.0), 1, 2), latency((1.0, 5.0, 2.0, 0.0), 3, 0), latency(1.0, 0, 9)
    (5.0, 5.0, 1.0)
    """
    if a == b:
        return 0.0
    if isinstance(comm, Mapping):
        return comm[min(a, b), max(a, b)]
    return max(comm[min(a, b) : max(a, b)]) if isinstance(comm, tuple) else comm


def latencies(comm: Comm) -> tuple[float, ...]:
    """Return all values of ``comm``."""
    if isinstance(comm, Mapping):
        return tuple(comm.values())
    return comm if isinstance(comm, tuple) else (comm,)


def each_latency(comm: Comm, change: Callable[[float], float]) -> Comm:
    """Return ``comm`` with every latency changed."""
    if isinstance(comm, Mapping):
        return {edge: change(value) for edge, value in comm.items()}
    return tuple(map(change, comm)) if isinstance(comm, tuple) else change(comm)


def delays(placement: Sequence[Sequence[int]], graph: StageGraph, comm: Comm) -> Delays | None:
    """Return the delay of every possible dependency; None if all delays are 0.

    Stages on one device pass results without a message, whatever ``comm`` is; where they are sharded, those that no
    edge joins wait for one another too (``deps``).
    """
    if comm == 0:
        return None
    by_edge = {(a, b): latency(comm, a, b) for a, b in graph.edges}
    held: dict[int, set[int]] = {}
    for row in placement:
        for s, device in enumerate(row):
            held.setdefault(device, set()).add(s)
    found: Delays = []
    for row in placement:
        own: list[dict[int, float]] = [dict.fromkeys(held[row[s]], 0.0) for s in range(graph.stages)]
        for (a, b), time in by_edge.items():
            own[a][b] = own[b][a] = time if row[a] != row[b] else 0.0
        found.append(own)
    return found
