"""Which host each device is on, and which device of which data-parallel copy it is.

Devices are numbered host by host, the host with most devices first. ``Numbering`` is the one place that says which
device of a copy has which number: costs, the order of ranks and predictions for other hosts all ask it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise, repeat
from math import gcd

from raypipe.schedule.shape import Innermost


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a cluster in the order in which their devices are numbered."""

    per_host: int
    """Devices of every host that ``counts`` does not list."""
    counts: tuple[int, ...] = ()
    """Devices of the first hosts, where they are not ``per_host`` each; at least 1."""
    kinds: tuple[int, ...] = ()
    """Kind of each of these hosts' devices, where there are several kinds; hosts of one kind follow one another."""

    @property
    def uniform(self) -> bool:
        """Return whether device d is on host ``d // per_host``."""
        return all(count == self.per_host for count in self.counts)

    def of(self, device: int) -> int:
        """Return the host of a device.

        >>> [Hosts(2, (3, 1)).of(device) for device in range(8)]
        [0, 0, 0, 1, 2, 2, 3, 3]
        """
        for host, count in enumerate(self.counts):
            if device < count:
                return host
            device -= count
        return len(self.counts) + device // self.per_host

    def kind_of(self, device: int) -> int:
        """Return the kind of a device; 0 where all are of one kind.

        >>> [Hosts(2, (2, 1), (0, 1)).kind_of(device) for device in range(3)]
        [0, 0, 1]
        """
        return self.kinds[self.of(device)] if self.kinds else 0

    def of_first(self, devices: int) -> tuple[int, ...]:
        """Return how many of the first ``devices`` devices are on each host.

        >>> Hosts(4).of_first(10), Hosts(4, (4, 3)).of_first(6)
        ((4, 4, 2), (4, 2))
        """
        result: list[int] = []
        for most in (*self.counts, *repeat(self.per_host, -(-devices // self.per_host))):
            if devices <= 0:
                break
            result.append(min(most, devices))
            devices -= most
        return tuple(result)

    def busy(self, devices: int) -> int:
        """Return how many devices of a host work at most, if the first ``devices`` devices do.

        >>> Hosts(8).busy(3), Hosts(8).busy(20), Hosts(4, (3, 3)).busy(6)
        (3, 8, 3)
        """
        return min(self.per_host, devices) if self.uniform else max(self.of_first(devices), default=0)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The number of each device of each data-parallel copy, host by host."""

    width: int
    """Devices of a copy."""
    copies: int
    innermost: Innermost = "stages"

    @staticmethod
    def of(width: int, copies: int, innermost: Innermost, several_kinds: bool) -> Numbering:
        """Return the numbering of a plan that asks for ``innermost``.

        Where devices are of several kinds, a position's devices in all copies follow one another whatever it asks for,
        so that copies are alike as far as the numbers of devices allow: a copy that were slower than the others would
        have them wait in every all-reduce.
        """
        return Numbering(width, copies, "replicas" if several_kinds else innermost)

    def number(self, copy: int, position: int) -> int:
        """Return the number of the device at ``position`` in a copy.

        >>> [Numbering(2, 3).number(copy, 1) for copy in range(3)]
        [1, 3, 5]
        >>> [Numbering(2, 3, "replicas").number(copy, 1) for copy in range(3)]
        [3, 4, 5]
        """
        return position * self.copies + copy if self.innermost == "replicas" else copy * self.width + position

    def by_rank(self) -> list[int]:
        """Return the number of each rank's device; ranks count through one copy after another."""
        return [self.number(copy, position) for copy in range(self.copies) for position in range(self.width)]


def devices_on_hosts(names: Sequence[str]) -> tuple[int, ...]:
    """Return the devices of each host from the host's name per device, in the devices' order.

    >>> devices_on_hosts(["a", "a", "b"])
    (2, 1)
    """
    return tuple(sum(1 for _ in same) for _, same in groupby(names))


def words(counts: Sequence[int]) -> str:
    """Describe the devices of each host, for messages.

    >>> words([4, 4, 2]), words([8])
    ('4 + 4 + 2 devices on 3 hosts', '8 devices on 1 host')
    """
    hosts = f"{len(counts)} host{'s' * (len(counts) != 1)}"
    return f"{' + '.join(map(str, counts))} device{'s' * (sum(counts) != 1)} on {hosts}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices of a group are distributed over hosts."""

    hosts: int
    per_host: int
    """Devices of the group on the host that has most of them."""

    @property
    def group(self) -> int:
        """Size of the group if every host had ``per_host`` of its devices."""
        return self.hosts * self.per_host

    @staticmethod
    def of(devices: Sequence[int], hosts: Hosts) -> Layout:
        """Return the layout of some devices, which are numbered host by host.

        >>> Layout.of([0, 1, 8, 9], Hosts(8))
        Layout(hosts=2, per_host=2)
        """
        counts = Counter(map(hosts.of, set(devices)))
        return Layout(len(counts), max(counts.values(), default=0))


@dataclass(frozen=True, slots=True)
class Placed:
    """Data-parallel copies of a placement on hosts.

    Thousands of copies take no longer to evaluate than a few, because their positions on hosts repeat where all hosts
    have as many devices and pipelines follow one another.
    """

    rows: tuple[tuple[int, ...], ...]
    """Placement of the first copy: per replica, the device of each stage."""
    copies: int
    hosts: Hosts
    numbering: Numbering
    every: int = 1
    """These are every so-many-th of the copies that are numbered."""

    @staticmethod
    def of(rows: Sequence[Sequence[int]], copies: int, hosts: Hosts, innermost: Innermost = "stages") -> Placed:
        """Build it from the first copy's placement."""
        width = 1 + max(d for row in rows for d in row)
        return Placed(tuple(map(tuple, rows)), copies, hosts, Numbering.of(width, copies, innermost, bool(hosts.kinds)))

    def device(self, copy: int, position: int) -> int:
        """Return the number, among the cluster's devices, of the device that is ``position`` in a copy.

        >>> Placed.of([(0, 1)], 2, Hosts(2, (2, 2), (0, 1))).device(1, 0)
        1
        """
        return self.numbering.number(copy * self.every, position)

    def kinds(self, stages: Collection[int]) -> set[int]:
        """Return the kinds of the devices, of all copies, that hold any of these stages."""
        if not self.hosts.kinds:
            return {0}
        positions = {row[stage] for row in self.rows for stage in stages}
        return {self.hosts.kind_of(self.device(copy, p)) for copy in range(self.copies) for p in positions}

    @property
    def one_per_host(self) -> bool:
        """Return whether no two devices share a host."""
        return self.hosts.uniform and self.hosts.per_host == 1

    @property
    def turn(self) -> int:
        """Number of copies after which a copy begins at the same position on a host again."""
        if self.numbering.innermost == "replicas" or not self.hosts.uniform:
            return self.copies
        return self.hosts.per_host // gcd(self.numbering.width * self.every, self.hosts.per_host)

    def layout(self, devices: Collection[int]) -> Layout:
        """Return how these devices of all copies are distributed over hosts.

        >>> Placed.of([(0, 1, 2)], 5, Hosts(2)).layout([0])
        Layout(hosts=5, per_host=1)
        >>> Placed.of([(0, 1)], 8, Hosts(8)).layout([0])
        Layout(hosts=2, per_host=4)
        >>> Placed.of([(0, 1)], 8, Hosts(8), "replicas").layout([0])
        Layout(hosts=1, per_host=8)
        """
        if self.one_per_host:
            return Layout(self.copies * len(set(devices)), 1)
        turns, left = divmod(self.copies, self.turn)
        parts = [self._layout(devices, self.turn)] * bool(turns) + [self._layout(devices, left)] * bool(left)
        hosts = sum(n * part.hosts for n, part in zip((turns, 1) if turns else (1,), parts, strict=False))
        return Layout(hosts, max(part.per_host for part in parts))

    def _layout(self, devices: Collection[int], copies: int) -> Layout:
        return Layout.of([self.device(copy, d) for copy in range(copies) for d in devices], self.hosts)

    def crossings(self) -> list[set[int]]:
        """Per link between stages, how many copies' messages leave one host over it at once; 0 for one that stays.

        Copies run alike, so they send at the same time. Stages on one device send each other nothing.

        >>> Placed.of([(0, 1)], 4, Hosts(4)).crossings(), Placed.of([(0, 1)], 4, Hosts(4), "replicas").crossings()
        ([{0}], [{4}])
        """
        copies = min(self.copies, self.turn)
        result: list[set[int]] = [set() for _ in self.rows[0][:-1]]
        for row in self.rows:
            for seen, (a, b) in zip(result, pairwise(row), strict=True):
                if a != b:
                    seen.update(_leaving(self.hosts, self.numbering, self.every, copies, a, b))
        return result

    def same_experts(self, experts: int) -> Placed:
        """Return the copies that hold the same share of experts, which so many consecutive ones divide."""
        return replace(self, copies=self.copies // experts, every=self.every * experts)

    def sharing(self, layout: Layout) -> int:
        """Return how many groups like this one use a host's links."""
        return max(1, self.busy // max(1, layout.per_host))

    @property
    def busy(self) -> int:
        """Number of devices of a host that are used."""
        return self.hosts.busy(self.copies * len({d for row in self.rows for d in row}))


@lru_cache(maxsize=4096)
def _leaving(hosts: Hosts, numbering: Numbering, every: int, copies: int, a: int, b: int) -> frozenset[int]:
    """How many of the copies' messages from position a to b leave, or enter, one host at once; 0 for one that stays.

    Kept, as many candidates ask for the same. ``every``: see ``Placed``.
    """
    ends = [(hosts.of(numbering.number(c * every, a)), hosts.of(numbering.number(c * every, b))) for c in range(copies)]
    out, into = (Counter(pair[end] for pair in ends if pair[0] != pair[1]) for end in (0, 1))
    return frozenset({*out.values(), *into.values(), *([0] if any(x == y for x, y in ends) else [])})
