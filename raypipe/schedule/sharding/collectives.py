"""Which tasks of a schedule are one collective: the same AG, RS or AR on all members of its group.

An AR is one collective over all replicas of its stage. AG and RS run in the stage's shard groups: the data-parallel
copies of one replica. The n-th AG of a stage replica meets the n-th of every other member. Copies run the same order
(``passes.replicate``), so every device of a group issues its collectives in the same order, and none waits for another
in a circle; the verifier checks both.
"""

from __future__ import annotations

from collections import Counter

from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.kinds import NETWORK, Kind

Collective = tuple[Kind, int, tuple[int, int], int]
"""(kind, stage, shard group, how many of these the group has run before in this step)."""
_ALL = (0, 0)


def collectives(graph: TaskGraph) -> dict[int, Collective]:
    """Return, for each network task, the collective that it is part of."""
    sharding, replicas = graph.schedule.sharding, graph.schedule.replicas
    count: Counter[tuple[Kind, int, int]] = Counter()
    found: dict[int, Collective] = {}
    for i, (kind, stage, _, replica) in enumerate(graph.tasks[: graph.first[graph.schedule.devices]]):
        if kind not in NETWORK:
            continue
        if kind == "AR" or sharding is None:
            found[i] = (kind, stage, _ALL, 0)
        else:
            found[i] = (kind, stage, sharding.group_of(replica, replicas), count[kind, stage, replica])
            count[kind, stage, replica] += 1
    return found
