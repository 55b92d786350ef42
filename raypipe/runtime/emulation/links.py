"""The emulated network: how long messages, sums and gathers take, on links that are alike or differ within hosts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from raypipe.cost.hosts import Hosts, Layout, Placed
from raypipe.schedule.costs import CostTable, each_latency
from raypipe.schedule.ir import Schedule
from raypipe.schedule.shape import Innermost


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The emulated network, in seconds and bytes."""

    latency_s: float = 0.0
    """Latency of a message between devices, in addition to the cost table's ``comm``."""
    bytes_per_s: float = math.inf
    """Bandwidth of every directed link."""
    message_bytes: float = 0.0
    """Size of an activation or a gradient between two stages."""
    gradient_bytes: float = 0.0
    """Size of one stage's weight gradients, which are all-reduced over its holders; its weights are as large."""
    per_host: int = 0
    """Devices of a host; 0: every link is as above. Otherwise the bandwidth above is that of a host's link to others,
    which all that leaves the host at once shares."""
    inside_bytes_per_s: float = math.inf
    """Bandwidth of a link within a host."""
    innermost: Innermost = "stages"
    """Which devices share hosts (``cost.hosts.Numbering``)."""

    def messages_s(self, placed: Placed) -> list[float]:
        """Return the time of a message from each stage to the next, over the slowest link that it may take."""
        inside, between = self.message_bytes / self.inside_bytes_per_s, self.message_bytes / self.bytes_per_s
        return [
            self.latency_s + max((users * between if users else inside for users in result), default=0.0)
            for result in placed.crossings()
        ]

    def over(self, layouts: Collection[Layout], busy: int) -> Links:
        """Return the links as sums over such groups have them, while a host's other devices do theirs."""
        users = max((max(1, busy // layout.per_host) if layout.hosts > 1 else 0) for layout in layouts)
        return replace(self, bytes_per_s=self.bytes_per_s / users if users else self.inside_bytes_per_s)

    @property
    def seconds_per_message(self) -> float:
        """Time to transfer the bytes of one message."""
        return self.message_bytes / self.bytes_per_s

    def all_reduce_s(self, holders: int) -> float:
        """Return the time of an all-reduce over r = ``holders`` devices.

        It is that of Rabenseifner's algorithm: 2 log2(r) latencies, and 2 (r-1)/r of the bytes (Chimera section 3.4).
        """
        if holders < 2:
            return 0.0
        share = 2 * (holders - 1) / holders
        return 2 * math.log2(holders) * self.latency_s + share * self.gradient_bytes / self.bytes_per_s

    def gather_s(self, members: int) -> float:
        """Return the time of a gather, or a reduce-scatter, over the devices of a shard group: half an all-reduce."""
        return self.all_reduce_s(members) / 2


def with_links(
    costs: CostTable, links: Links, schedule: Schedule, placement: Sequence[Sequence[int]], copies: int
) -> CostTable:
    """Return the costs of a step with what the network takes; of messages on links that are alike, the latency only.

    On hosts, a message takes the time of its bytes and of those that leave the host with it over the same link; it
    does not wait for messages of other moments.

    Args:
        costs: of the tasks, in seconds.
        links: the network.
        schedule: of all copies.
        placement: of one copy.
        copies: data-parallel copies.
    """
    stages = range(schedule.stages)
    dividing = [schedule.exchange[1] if s in schedule.rules.experts else 1 for s in stages]
    holders = [len({held[s] for held in schedule.placement}) // dividing[s] for s in stages]
    members = [1] * schedule.stages
    if schedule.sharding is not None:
        group = schedule.sharding.group or schedule.sharding.copies
        members = [group if level else 1 for level in schedule.sharding.levels]
    summed, divided = [links] * schedule.stages, [links] * schedule.stages
    if links.per_host:
        placed = Placed.of(placement, copies, Hosts(links.per_host), links.innermost)
        more = [*links.messages_s(placed), 0.0]
        costs = replace(costs, comm=tuple(own + extra for own, extra in zip(costs.links, more, strict=True)))
        for s in stages:
            at = {row[s] for row in placed.rows}
            summed[s] = links.over([placed.layout(at)], placed.busy)
            firsts = range(0, copies, members[s])
            groups = [[placed.device(first + n, d) for n in range(members[s])] for first in firsts for d in at]
            divided[s] = links.over([Layout.of(group, placed.hosts) for group in groups], placed.busy)
    else:
        costs = replace(costs, comm=each_latency(costs.comm, lambda c: c + links.latency_s))
    gathers = [link.gather_s(m) for link, m in zip(divided, members, strict=True)]
    return replace(
        costs,
        all_reduce=tuple(
            replace(link, gradient_bytes=link.gradient_bytes / m).all_reduce_s(r // m)
            for link, r, m in zip(summed, holders, members, strict=True)
        ),
        gather=tuple(t + extra for t, extra in zip(costs.gather, gathers, strict=True)),
        reduce_scatter=tuple(t + extra for t, extra in zip(costs.reduce_scatter, gathers, strict=True)),
    )
