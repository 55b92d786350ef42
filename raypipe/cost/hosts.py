"""Which host each device is on, and which device of which data-parallel copy it is.

Devices are numbered host by host, the host with most devices first. ``Numbering`` is the one place that says which
device of a copy has which number: costs, the order of ranks and predictions for other hosts all ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

from raypipe.job.parallel_spec import Innermost


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
        found: list[int] = []
        for most in (*self.counts, *repeat(self.per_host, -(-devices // self.per_host))):
            if devices <= 0:
                break
            found.append(min(most, devices))
            devices -= most
        return tuple(found)

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
