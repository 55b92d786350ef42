"""The order of samples: a function of (split, seed, sample number), whatever the plan.

Blocks are visited in an order that is new in each epoch. ``together`` of them at a time make a window, and the samples
of a window are in an order of their own. So two samples of one block are nearly always far apart, memory holds a few
blocks, and any sample can be found without reading those before it, once the blocks' numbers of samples are known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from raypipe.data.sample_order import Split, permuted


@dataclass(frozen=True)
class BlockOrder:
    """In which order epochs visit blocks."""

    split: Split
    seed: int
    blocks: int
    """Number of blocks."""
    together: int
    """Blocks of a window."""

    @property
    def windows(self) -> int:
        """Number of windows of an epoch."""
        return -(-self.blocks // self.together)

    def window(self, epoch: int, number: int) -> list[int]:
        """Return the blocks of a window."""
        places = range(number * self.together, min(self.blocks, (number + 1) * self.together))
        return [permuted(self._key(epoch, -1), self.blocks, place) for place in places]

    def sample(self, epoch: int, number: int, samples: int, position: int) -> int:
        """Return which of a window's ``samples`` comes at a position."""
        return permuted(self._key(epoch, number), samples, position)

    def _key(self, epoch: int, window: int) -> int:
        # Held-out samples do not depend on the seed, so that the validation losses of all runs can be compared.
        return _key(self.split, self.seed if self.split == "train" else 0, epoch, window)


@lru_cache(maxsize=64)
def _key(split: str, seed: int, epoch: int, window: int) -> int:
    digest = hashlib.sha256(f"documents/{split}/{seed}/{epoch}/{window}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
