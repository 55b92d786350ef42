"""Measure messages and collectives between devices, over the transports that training uses."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from statistics import fmean

import ray

from raypipe.cost.collectives import Kind, Timed, TimedCollective
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.setup.communicators import Topology, rendezvous_of


class LinkBench:
    """Measures all devices joined in one world: pairs of them exchange messages, and groups run collectives."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.workers = workers
        locations = ray.get(workers.call("locate"))  # called again for a new port
        nodes = [at.peer.node for at in locations]
        self.inside = _pairs(nodes)
        self.between = _first_of_each(nodes)
        edges = [edge for a, b in (*self.inside, *self.between) for edge in ((a, b), (b, a))]
        self.groups = {size: tuple(range(size)) for size in group_sizes(len(nodes))}
        self.topology = Topology(
            peers=tuple(at.peer for at in locations),
            rendezvous=rendezvous_of(locations),
            edges=tuple(sorted(set(edges))),
            groups={f"first {size}": ranks for size, ranks in self.groups.items()},
            transport="auto",
            run_id=uuid.uuid4().hex[:8],
        )

    def connect(self) -> None:
        """Open every channel and make every group."""
        ray.get(self.workers.call("connect", self.topology))

    def messages(self, pairs: Sequence[tuple[int, int]], sizes: Sequence[int], repeats: int) -> list[Timed]:
        """Return the mean one-way seconds per size in bytes; all pairs measure at the same time."""
        if not pairs:
            return []
        refs = []
        for a, b in pairs:
            refs.append(self.workers.actors[a].message_seconds.remote(b, True, sizes, repeats))
            self.workers.actors[b].message_seconds.remote(a, False, sizes, repeats)
        found = ray.get(refs)
        return [
            Timed(float(size), fmean([t for times in found for t in times[k][1:] or times[k]]))
            for k, size in enumerate(sizes)
        ]

    def collective(self, kind: Kind, size: int, sizes: Sequence[int], repeats: int) -> list[TimedCollective]:
        """Return the mean seconds of the slowest device of a group of ``size``, per size of the whole buffer."""
        found = [
            one
            for one in ray.get(self.workers.call("collective_seconds", kind, f"first {size}", sizes, repeats))
            if one
        ]
        return [
            TimedCollective(kind, size, float(n), fmean(map(max, zip(*(one[k] for one in found), strict=True))))
            for k, n in enumerate(sizes)
        ]


def group_sizes(devices: int) -> list[int]:
    """Return the sizes of the groups that are measured: powers of two, and all devices.

    >>> group_sizes(6), group_sizes(1)
    ([2, 4, 6], [])
    """
    sizes = {2**k for k in range(1, devices.bit_length()) if 2**k <= devices}
    return sorted(sizes | ({devices} if devices > 1 else set()))


def _pairs(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Pair devices of the same host; no device is in two pairs.

    >>> _pairs(["a", "a", "b", "a", "a", "b"])
    [(0, 1), (2, 5), (3, 4)]
    """
    waiting: dict[str, int] = {}
    found = []
    for rank, node in enumerate(nodes):
        if node in waiting:
            found.append((waiting.pop(node), rank))
        else:
            waiting[node] = rank
    return sorted(found)


def _first_of_each(nodes: Sequence[str]) -> list[tuple[int, int]]:
    """Pair hosts, each represented by its first device; no host is in two pairs.

    >>> _first_of_each(["a", "a", "b", "c"])
    [(0, 2)]
    """
    first = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    return list(zip(first[::2], first[1::2], strict=False))
