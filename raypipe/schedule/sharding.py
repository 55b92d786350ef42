"""Which tasks of a schedule are one collective: the same AG, RS or AR on all members of its group.

An AR is one collective over all replicas of its stage. AG and RS run in the stage's shard groups: the data-parallel
copies of one replica. The n-th AG of a stage replica meets the n-th of every other member. Copies run the same order
(``passes.replicate``), so every device of a group issues its collectives in the same order, and none waits for another
in a circle; the verifier checks both. All-to-all of an expert group (DF, CF, DB, CB) is one collective per micro-batch
of the group's copies; the verifier's walk comes to an end only if all members issue theirs in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.ir import Schedule, Sharding, Task
from raypipe.schedule.kinds import EXCHANGES, NETWORK, SHARDED, WEIGHT_GRADIENTS, Kind

Collective = tuple[Kind, int, tuple[int, ...], int]
"""(kind, stage, shard group, how many of these the group has run before in this step)."""
_ALL = (0, 0)


def collectives(graph: TaskGraph) -> dict[int, Collective]:
    """Return, for each network task, the collective that it is part of."""
    sharding, replicas = graph.schedule.sharding, graph.schedule.replicas
    count: Counter[tuple[Kind, int, int]] = Counter()
    result: dict[int, Collective] = {}
    copies, together = graph.schedule.exchange
    of_copy, own = replicas // copies, graph.schedule.microbatches // copies
    for i, (kind, stage, mbs, replica) in enumerate(graph.tasks[: graph.first[graph.schedule.devices]]):
        if kind not in NETWORK:
            continue
        if kind in EXCHANGES:
            group = replica % of_copy, replica // of_copy // together, *(mb % own for mb in mbs)
            result[i] = (kind, stage, group, 0)
            continue
        if kind == "AR" or sharding is None:
            result[i] = (kind, stage, _ALL, 0)
        else:
            result[i] = (kind, stage, sharding.group_of(replica, replicas), count[kind, stage, replica])
            count[kind, stage, replica] += 1
    return result


# Which devices take part in the collectives of a sharded stage, as the runtime makes its process groups.


StageKey = tuple[int, int]
"""(stage, replica)."""


class ShardMember(NamedTuple):
    """One device's part in a sharded stage replica."""

    device: int
    group: tuple[int, ...]
    """Devices that divide the stage: its AG and RS are theirs. In the order of their shards."""
    others: tuple[int, ...]
    """Devices that hold the same shard in other groups (HSDP, further directions), itself included: they sum it."""

    @property
    def number(self) -> int:
        """Number of the shard that the device owns."""
        return self.group.index(self.device)


def copies_of_experts(group: int, experts: int) -> int:
    """Return how many of ``group`` consecutive copies, which divide a stage, hold the same share of its experts, which
    ``experts`` consecutive ones divide; they divide it again. 1 where not all shares have as many.

    >>> copies_of_experts(8, 2), copies_of_experts(2, 2), copies_of_experts(6, 4)
    (4, 1, 1)
    """
    return group // experts if group % experts == 0 else 1


def shard_members(
    sharding: Sharding | None, placement: tuple[tuple[int, ...], ...], shares: Sequence[int] = ()
) -> dict[StageKey, ShardMember]:
    """Return the members of every sharded stage replica; empty if the schedule is not sharded.

    ``shares``: which share of the experts each replica holds, for the members that divide this share again (none if
    ``copies_of_experts`` says so); empty for those that divide all else.
    """
    of = shares or (0,) * len(placement)
    if sharding is None or (shares and copies_of_experts(sharding.group or sharding.copies, 1 + max(shares)) == 1):
        return {}
    result: dict[StageKey, ShardMember] = {}
    for stage, level in enumerate(sharding.levels):
        if not level:
            continue
        groups: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for replica, row in enumerate(placement):
            own = (*sharding.group_of(replica, len(placement)), of[replica])
            groups[own] = tuple(sorted({*groups.get(own, ()), row[stage]}))
        for replica, row in enumerate(placement):
            group = groups[(*sharding.group_of(replica, len(placement)), of[replica])]
            number = group.index(row[stage])
            others = tuple(sorted({one[number] for (*_, share), one in groups.items() if share == of[replica]}))
            result[stage, replica] = ShardMember(row[stage], group, others)
    return result


# Memory of a device's sharded stages beyond its share, task by task; it depends on the order only.
#
# Level 3: the gathered weights, from AG to FREE. Levels 2 and 3: the full gradients, from the first weight gradient
# after an RS to the end of the next RS. When that end comes does not follow from the order. A device makes sure of it
# where it takes the next such buffer: it then waits for all reduce-scatters but the last one (``deps``), and at an AR
# or a U for all. Until there the buffer counts.


class LiveShards:
    """Plays one device's order."""

    def __init__(self, schedule: Schedule, weights: Sequence[float], gradients: Sequence[float]) -> None:
        """Start with nothing gathered; ``weights`` and ``gradients`` are the full sizes of each stage's."""
        self.schedule, self._weights, self._sizes = schedule, weights, gradients
        self.gathered = 0.0
        """Gathered weights."""
        self.gradients = 0.0
        """Full gradients that are added to, or on their way."""
        self._open: set[tuple[int, int]] = set()
        self._scattering: list[float] = []

    def task(self, task: Task) -> None:
        """Begin the next task of the order."""
        kind, stage, _, replica = task
        level, key = self.schedule.zero_level(stage), (stage, replica)
        if kind in ("AR", "U"):
            self._ended(all_but=0)
        elif kind in WEIGHT_GRADIENTS and level >= 2 and key not in self._open:
            self._ended(all_but=1)
            self._open.add(key)
            self.gradients += self._sizes[stage]
        elif kind == "RS" and key in self._open:
            self._open.remove(key)
            self._scattering.append(self._sizes[stage])
        elif kind in SHARDED and kind != "RS" and level == 3:
            self.gathered += self._weights[stage] if kind == "AG" else -self._weights[stage]

    def _ended(self, all_but: int) -> None:
        while len(self._scattering) > all_but:
            self.gradients -= self._scattering.pop(0)
        if not self._scattering and not self._open:
            self.gradients = 0.0  # and no rounding goes on


def shard_peaks(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """Return, per device, the most that gathered weights and full gradients take; ``sizes`` are those of each stage."""
    peaks = []
    for order in schedule.orders:
        live, most = LiveShards(schedule, sizes, sizes), 0.0
        for task in order:
            live.task(task)
            most = max(most, live.gathered + live.gradients)
        peaks.append(most)
    return peaks
