"""A keeper holds copies of workers' shards in its memory; such a copy is read as a checkpoint is, without a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError
from safetensors.torch import load
from torch import Tensor

from raypipe.checkpoint import Checkpoint, ShardInfo
from raypipe.errors import CheckpointError, TransportError


class Keeper:
    """A process that holds copies in its memory."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, list[bytes]]] = {}
        self._whole: dict[int, dict[str, ShardInfo]] = {}

    def take(self, number: int, name: str, block: NDArray[np.uint8]) -> None:
        """Add the next block of a shard of copy ``number``."""
        self._held.setdefault(number, {}).setdefault(name, []).append(block.tobytes())

    def finish(self, number: int, name: str, info: ShardInfo) -> None:
        """Note that a shard is here as a whole, whether or not its worker lives to tell."""
        self._whole.setdefault(number, {})[name] = info

    def whole(self) -> dict[int, dict[str, ShardInfo]]:
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
        return tuple(ray.put(block) for block in self._held[number][name])


@dataclass(frozen=True)
class KeptShard:
    """A worker's shard of a copy, and who holds it."""

    number: int
    """Of the copy."""
    info: ShardInfo
    keepers: tuple[Any, ...]

    def blocks(self) -> tuple[Any, ...]:
        """Return references of its blocks, in order.

        Raises:
            TransportError: nobody holds it any more.
        """
        for keeper in self.keepers:
            try:
                blocks: tuple[Any, ...] = ray.get(keeper.give.remote(self.number, Path(self.info.file).stem))
            except RayError:
                continue
            return blocks
        raise TransportError(self.info.file, "is kept by nobody any more", "restart from the last checkpoint")


@dataclass(frozen=True)
class KeptCopy(Checkpoint):
    """The state of a run after some step, in the memory of keepers."""

    shards: tuple[KeptShard, ...] = field(default=())

    @staticmethod
    def of(step: int, meta: dict[str, Any], shards: Iterable[KeptShard]) -> KeptCopy:
        """Return the copy that consists of these shards."""
        shards = tuple(shards)
        files = {key: shard.info.file for shard in shards for key in shard.info.keys}
        return KeptCopy(Path(f"the copy of step {step}"), step, meta, files, shards)

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """See Checkpoint.read; shards come from whoever holds them.

        Raises:
            CheckpointError: the copy does not hold a key.
            TransportError: nobody holds one of its shards as it was sent.
        """
        wanted = list(keys)
        missing = [key for key in wanted if key not in self.files]
        if missing:
            raise CheckpointError(str(self.path), f"holds no {missing[0]}", "restart from the last checkpoint")
        by_file = {shard.info.file: shard for shard in self.shards}
        fetched = cache(lambda file: _tensors(by_file[file]))
        return {key: fetched(self.files[key])[key] for key in wanted}


def _tensors(shard: KeptShard) -> dict[str, Tensor]:
    content = b"".join(bytes(block) for block in ray.get(list(shard.blocks())))
    if hashlib.sha256(content).hexdigest() != shard.info.sha256:
        why = "is not what its worker sent"
        raise TransportError(shard.info.file, why, "restart from the last checkpoint; memory is at fault")
    result: dict[str, Tensor] = load(content)
    return result
