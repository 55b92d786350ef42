"""A process that holds copies of workers' state in its node's memory, and how a worker sends it one."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from raypipe.checkpoint import ShardInfo, Snapshot

AT_ONCE = 4
"""Blocks of a copy that are under way at once."""


class Keeper:
    """A process that holds copies in its memory."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, list[bytes]]] = {}

    def take(self, number: int, name: str, block: NDArray[np.uint8]) -> None:
        """Add the next block of a shard of copy ``number``."""
        self._held.setdefault(number, {}).setdefault(name, []).append(block.tobytes())

    def lives(self) -> None:
        """Return at once."""

    def drop_before(self, number: int) -> None:
        """Drop the copies before this one; of later ones, whose numbers are smaller, some may have begun to arrive."""
        self._held = {n: shards for n, shards in self._held.items() if n <= number}

    def give(self, number: int, name: str) -> tuple[Any, ...]:
        """Return references of a shard's blocks, in order."""
        return tuple(ray.put(block) for block in self._held[number][name])


def send_snapshot(keepers: Sequence[Any], number: int, name: str, snapshot: Snapshot) -> ShardInfo | None:
    """Send a worker's shard of copy ``number`` to keepers; return what it is, or None if one of them is gone."""
    digest, size = hashlib.sha256(), 0
    under_way: deque[Any] = deque()
    try:
        for block in snapshot.blocks():
            digest.update(block)
            size += len(block)
            put = ray.put(np.frombuffer(block, dtype=np.uint8))
            under_way.append([keeper.take.remote(number, name, put) for keeper in keepers])
            if len(under_way) >= AT_ONCE:
                ray.get(under_way.popleft())
        for calls in under_way:
            ray.get(calls)
    except RayError:
        return None
    return ShardInfo(f"{name}.safetensors", size, digest.hexdigest(), snapshot.keys)
