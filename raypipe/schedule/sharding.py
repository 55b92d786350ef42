"""Which tasks of a schedule are one collective: the same AG, RS or AR on all members of its group.

An AR is one collective over all replicas of its stage. AG and RS run in the stage's shard groups: the data-parallel
copies of one replica. The n-th AG of a stage replica meets the n-th of every other member. Copies run the same order
(``passes.replicate``), so every device of a group issues its collectives in the same order, and none waits for another
in a circle; the verifier checks both. All-to-all of an expert group (DF, CF, DB, CB) is one collective per micro-batch
of the group's copies; the verifier's walk comes to an end only if all members issue theirs in one order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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


def whole_shards(costs: Sequence[float], shards: int) -> list[list[int]]:
    """Divide what may not be cut over shards by cost: the next most costly to the cheapest shard so far.

    Source: Graham 1969 (LPT): the most costly shard is at most 4/3 of the best one.

    >>> whole_shards([2.0, 3.0, 3.0, 1.0], 2)
    [[1, 0], [2, 3]]
    """
    loads = [(0.0, shard) for shard in range(shards)]
    result: list[list[int]] = [[] for _ in loads]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + costs[i], least))
        result[least].append(i)
    return result


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


# The process groups of a run: those that its devices sum gradients in and gather weights in, and those of copies that
# divide experts or sequences. Runs open them (``runtime.setup``), and plans count what they take (``cost.memory``).


EXPERT_GROUP, CONTEXT_GROUP = "experts", "context"
"""What the names of groups of devices that divide experts, or sequences, begin with."""


class RunGroups(NamedTuple):
    """The process groups of a run, by name."""

    opened: dict[str, tuple[int, ...]]
    """Devices of each, in the order in which every device opens them."""
    served_by: dict[str, str]
    """Further groups, each with the one of ``opened`` that serves it; see ``served_by_another``."""


def run_groups(
    placement: tuple[tuple[int, ...], ...],
    sharding: Sharding | None = None,
    copies: int = 1,
    *,
    tied: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    experts: int = 1,
    context: int = 1,
    in_order: bool = False,
) -> RunGroups:
    """Return the process groups of a run.

    Args:
        placement: device of each stage, per replica.
        sharding: of the schedule.
        copies: data-parallel copies that the placement holds.
        tied: devices that sum a tied parameter apart from its stage's others, by the name of their group.
        experts: consecutive copies that divide the experts of each layer.
        context: consecutive copies that divide each sequence.
        in_order: devices that hold a stage start their sums and gathers in one order (``passes.sync.are_copies``).
    """
    shares = copy_ranks(len(placement), copies, experts) if experts > 1 else ()
    sums = sum_groups(placement, sharding, tied, shares)
    served_by = served_by_another(sums) if in_order else {}
    opened = {name: devices for name, devices in sums.items() if name not in served_by}
    opened |= copy_groups(EXPERT_GROUP, placement, copies, experts)
    return RunGroups(opened | copy_groups(CONTEXT_GROUP, placement, copies, context), served_by)


def sum_groups(
    placement: tuple[tuple[int, ...], ...],
    sharding: Sharding | None = None,
    tied: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    shares: Sequence[int] = (),
) -> dict[str, tuple[int, ...]]:
    """Return the groups of ``run_groups`` that sum gradients or gather weights.

    What devices divide is summed in the groups that divide it, and only else in one of all that hold it.

    ``shares``: which share of the experts each replica holds; empty where experts are not divided.
    """
    divided = {key: one for key, one in shard_members(sharding, placement).items() if len(one.group) > 1}
    again = shard_members(sharding, placement, shares) if shares else {}
    wanted: dict[str, tuple[int, ...]] = {}
    for stage in range(len(placement[0])):
        if (stage, 0) not in divided:
            wanted[stage_group(stage)] = tuple(sorted({row[stage] for row in placement}))
        for share in range(1 + max(shares)) if shares and (stage, 0) not in again else ():
            holders = {row[stage] for row, own in zip(placement, shares, strict=True) if own == share}
            wanted[expert_sum_group(stage, share)] = tuple(sorted(holders))
    wanted |= tied
    for members, of in ((divided, None), (again, shares)):
        for (stage, replica), member in members.items():
            own = None if of is None else of[replica]
            wanted[dividing_group(stage, member, own)] = member.group
            wanted[same_shard_group(stage, member, own)] = member.others
    return {name: devices for name, devices in wanted.items() if len(devices) > 1}


def stage_group(stage: int) -> str:
    """Return the name of the group that all-reduces a stage's gradients."""
    return f"stage {stage}"


def expert_sum_group(stage: int, share: int) -> str:
    """Return the name of the group that all-reduces the gradients of one share of a stage's experts."""
    return f"stage {stage}{_of_share(share)}"


def dividing_group(stage: int, member: ShardMember, share: int | None = None) -> str:
    """Return the name of the group that gathers a sharded stage's weights and reduce-scatters its gradients; with
    ``share``, those of that share of its experts."""
    return f"shards of stage {stage}, {member.group[0]}{_of_share(share)}"


def same_shard_group(stage: int, member: ShardMember, share: int | None = None) -> str:
    """Return the name of the group that all-reduces one shard of a stage's gradients, or of a share of its experts."""
    return f"shard {member.number} of stage {stage}{_of_share(share)}"


def _of_share(share: int | None) -> str:
    return "" if share is None else f", share {share} of the experts"


def served_by_another(groups: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the groups that need no communicator because an earlier one has the same members, with its name.

    A communicator takes memory of a GPU, and a device may hold dozens of stages. It carries one collective after the
    other, so all members have to start them in one order: ``passes.sync.are_copies``.
    """
    first: dict[tuple[int, ...], str] = {}
    return {name: one for name, ranks in groups.items() if (one := first.setdefault(ranks, name)) != name}


def copy_ranks(replicas: int, copies: int, together: int) -> tuple[int, ...]:
    """Return which share each replica has of what ``together`` consecutive copies divide.

    >>> copy_ranks(replicas=8, copies=4, together=2)  # two directions in each copy
    (0, 0, 1, 1, 0, 0, 1, 1)
    """
    return tuple(replica // (replicas // copies) % together for replica in range(replicas))


def copy_groups(
    kind: str, placement: Sequence[Sequence[int]], copies: int, together: int
) -> dict[str, tuple[int, ...]]:
    """Return the groups of devices that divide something, by name; each has one share of all stages in its place.

    >>> copy_groups("experts", [[0, 1], [2, 3]], copies=2, together=2)
    {'experts 0, 2': (0, 2), 'experts 1, 3': (1, 3)}
    """
    if together == 1:
        return {}
    of_copy = len(placement) // copies
    result: dict[str, tuple[int, ...]] = {}
    for first in range(0, len(placement), of_copy * together):
        for replica in range(first, first + of_copy):
            members = [placement[replica + n * of_copy] for n in range(together)]
            for devices in zip(*members, strict=True):
                result[f"{kind} {', '.join(map(str, devices))}"] = devices
    return result


def fewest_copies(copies: int, group: int, together: int) -> tuple[int, int, int]:
    """Return the least numbers with which a device is in as many groups of ``run_groups``: what counts is only which of
    them are 1 and which are equal or divide one another.

    >>> fewest_copies(copies=512, group=64, together=8), fewest_copies(copies=512, group=8, together=64)
    ((8, 4, 2), (8, 2, 4))
    >>> fewest_copies(copies=512, group=512, together=1)
    (2, 2, 1)
    """
    least = sorted((group, together))
    if least[1] % least[0]:
        return copies, group, together
    low = min(2, least[0])
    high = low * min(2, least[1] // least[0])
    few = high * min(2, copies // least[1])
    return (few, low, high) if group < together else (few, high, low)


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
