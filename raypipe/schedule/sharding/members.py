"""Which devices take part in the collectives of a sharded stage, as the runtime makes its process groups."""

from __future__ import annotations

from typing import NamedTuple

from raypipe.schedule.ir import Sharding

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


def shard_members(sharding: Sharding | None, placement: tuple[tuple[int, ...], ...]) -> dict[StageKey, ShardMember]:
    """Return the members of every sharded stage replica; empty if the schedule is not sharded."""
    found: dict[StageKey, ShardMember] = {}
    for stage, level in enumerate(sharding.levels if sharding is not None else ()):
        if not level:
            continue
        assert sharding is not None
        groups: dict[tuple[int, int], tuple[int, ...]] = {}
        for replica, row in enumerate(placement):
            own = sharding.group_of(replica, len(placement))
            groups[own] = tuple(sorted({*groups.get(own, ()), row[stage]}))
        for replica, row in enumerate(placement):
            group = groups[sharding.group_of(replica, len(placement))]
            number = group.index(row[stage])
            others = tuple(sorted({one[number] for one in groups.values()}))
            found[stage, replica] = ShardMember(row[stage], group, others)
    return found
