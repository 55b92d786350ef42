"""A keeper holds copies of workers' shards in its memory (``saving.neighbour_copies``).

This module imports no torch, so that a keeper is there soon where a run goes on after the loss of a node: until its
first copy has arrived, another loss costs more steps.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from raypipe.errors import TransportError


class Keeper:
    """A process that holds copies in its memory."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, list[bytes]]] = {}
        self._whole: dict[int, dict[str, bytes]] = {}
        self._used_s = time.process_time()

    def take(self, number: int, name: str, block: NDArray[np.uint8]) -> None:
        """Add the next block of a shard of copy ``number``."""
        self._held.setdefault(number, {}).setdefault(name, []).append(block.tobytes())

    def finish(self, number: int, name: str, size: int, info: bytes) -> float:
        """Note that a shard is here as a whole, whether or not its worker lives to tell.

        Args:
            number: of the copy.
            name: of the shard.
            size: of its file, in bytes.
            info: a ``ShardInfo``, pickled: its module imports torch.

        Returns the seconds of processor time since it was called before.

        Raises:
            TransportError: some of it did not arrive.
        """
        if sum(map(len, self._held.get(number, {}).get(name, []))) != size:
            raise TransportError(name, "some blocks of a copy did not arrive", "nothing: the next copy follows")
        self._whole.setdefault(number, {})[name] = info
        before, self._used_s = self._used_s, time.process_time()
        return self._used_s - before

    def whole(self) -> dict[int, dict[str, bytes]]:
        """Return the shards that are here as a whole, by copy."""
        return self._whole

    def lives(self) -> None:
        """Return at once."""

    def drop_before(self, number: int) -> None:
        """Drop the copies before this one; of later ones, whose numbers are smaller, some may have begun to arrive."""
        self._held = {n: shards for n, shards in self._held.items() if n <= number}
        self._whole = {n: shards for n, shards in self._whole.items() if n <= number}

    def give(self, number: int, name: str) -> tuple[Any, ...]:
        """Return references of a shard's blocks, in order."""
        assert name in self._whole[number]
        return tuple(ray.put(block) for block in self._held[number][name])
