"""From layers on devices to stages: as few as let every device begin and send as early as the layers would.

Connected layers of one device are one stage if they wait for the same tensors of other devices, directly or not, so
that they can begin together; and if the same tensors for other devices wait for them, so that what they make is needed
equally soon. Along an edge from stage to stage, the first set can only grow and the second only shrink, so no two
stages wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.graph.stages.links import Result

Stages = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""(layers of each stage, device of each stage)."""


def stages_of(results: Sequence[Result], devices: Sequence[int]) -> Stages:
    """Group layers into stages, numbered in an order in which they can run.

    Args:
        results: the model's, whose layers are numbered in an order in which they can run.
        devices: device of each layer.
    """
    count = len(devices)
    edges = {(one.made_by, reader) for one in results for reader in one.read_by}
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in sorted(edges):
        before[b].append(a)
        after[a].append(b)
    # Sets of layers, as bits: those of other devices that a layer waits for; it and those after it that feed others.
    waits, feeds = [0] * count, [0] * count
    for i in range(count):
        for p in before[i]:
            waits[i] |= waits[p] | (devices[p] != devices[i]) << p
    for i in reversed(range(count)):
        for n in after[i]:
            feeds[i] |= feeds[n] | (devices[n] != devices[i]) << i
    key = [(devices[i], waits[i], feeds[i]) for i in range(count)]
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in edges:
        if key[a] == key[b]:
            parent[root(b)] = root(a)
    groups: dict[int, list[int]] = {}
    for i in range(count):
        groups.setdefault(root(i), []).append(i)
    ordered = sorted(groups.values(), key=lambda own: (waits[own[0]].bit_count() - feeds[own[0]].bit_count(), own[0]))
    return tuple(map(tuple, ordered)), tuple(devices[own[0]] for own in ordered)
