"""Where the elements of several parameters lie in one flat tensor that the members of a group divide evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Part(NamedTuple):
    """Consecutive elements of one parameter that lie in one shard."""

    name: str | None
    """The parameter; None for padding at the end of the flat tensor."""
    begin: int
    """First element, counted in the parameter."""
    size: int
    """Number of elements."""
    at: int
    """First element, counted in the shard."""


@dataclass(frozen=True)
class FlatLayout:
    """Parameters one after another, padded to a multiple of the number of shards.

    Args:
        sizes: elements of each parameter, by name; in this order they lie in the flat tensor.
        shards: number of members.
    """

    sizes: Mapping[str, int]
    shards: int

    @property
    def shard(self) -> int:
        """Elements of one shard.

        >>> FlatLayout({"a": 3, "b": 2}, 2).shard
        3
        """
        return -(-sum(self.sizes.values()) // self.shards)

    @property
    def padded(self) -> int:
        """Elements of the flat tensor."""
        return self.shard * self.shards

    @property
    def offsets(self) -> dict[str, int]:
        """First element of each parameter in the flat tensor.

        >>> FlatLayout({"a": 3, "b": 2}, 2).offsets
        {'a': 0, 'b': 3}
        """
        return dict(zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False))

    def parts(self, index: int) -> list[Part]:
        """Return what lies in shard ``index``, in order; together the parts cover it.

        >>> FlatLayout({"a": 3, "b": 2}, 2).parts(1)
        [Part(name='b', begin=0, size=2, at=0), Part(name=None, begin=0, size=1, at=2)]
        """
        first, end = index * self.shard, (index + 1) * self.shard
        found: list[Part] = []
        for name, offset in self.offsets.items():
            begin, until = max(first, offset), min(end, offset + self.sizes[name])
            if begin < until:
                found.append(Part(name, begin - offset, until - begin, begin - first))
        used = sum(part.size for part in found)
        if used < self.shard:
            found.append(Part(None, 0, self.shard - used, used))
        return found
