"""A packed, memory-mapped corpus: sample k of step t is the same for every process and plan."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.sample_order import SPLITS, Split, permuted
from raypipe.errors import SpecError
from raypipe.files import read_json

__all__ = ["META", "SPLITS", "Corpus", "Split", "order_key"]

META = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """Two arrays of bytes, and the rule that cuts samples from them.

    A split of N bytes holds ``(N - 1) // sequence`` adjacent windows; a sample is one window and, as targets, the same
    shifted by one. Sample k of step t is number ``t * batch + k`` in a sequence of epochs, each of which visits all
    windows in an order that depends only on (seed, epoch).
    """

    meta: dict[str, Any]
    """The facts that ``prepare`` wrote: source, sequence, bytes and files per split, files skipped, digests."""
    arrays: dict[Split, npt.NDArray[np.uint8]]
    sequence: int
    """Number of tokens of a sample."""

    @staticmethod
    def open(directory: Path) -> Corpus:
        """Map the corpus that ``prepare`` wrote.

        Raises:
            SpecError: it is missing or damaged.
        """
        try:
            meta = read_json(directory / META)
            arrays: dict[Split, npt.NDArray[np.uint8]] = {
                # A plain view of the map, because slicing numpy's memmap class takes some microseconds longer.
                split: np.asarray(np.load(directory / f"{split}.npy", mmap_mode="r"))
                for split in SPLITS
            }
            return Corpus(meta, arrays, int(meta["sequence"]))
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
            fix = "prepare the data again: remove the folder, then --resume does"
            raise SpecError(str(directory), f"holds no packed corpus: {error}", fix) from None

    def windows(self, split: Split) -> int:
        """Return the number of samples of one epoch."""
        return (len(self.arrays[split]) - 1) // self.sequence

    def samples(self, split: Split, seed: int, step: int, first: int, count: int, batch: int) -> tuple[Tensor, Tensor]:
        """Read samples ``first`` to ``first + count - 1`` of a step's mini-batch of ``batch``.

        Returns tokens and targets, each int64 ``[count, sequence]``.
        """
        rows = self.rows(split, seed, step, first, count, batch)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def rows(self, split: Split, seed: int, step: int, first: int, count: int, batch: int) -> Tensor:
        """Read the same samples as int64 ``[count, sequence + 1]``, tokens and targets overlapping.

        Held-out samples do not depend on the seed, so that the validation losses of all runs can be compared.
        """
        rows = np.empty((count, self.sequence + 1), dtype=np.int64)
        array, sequence, windows = self.arrays[split], self.sequence, self.windows(split)
        for row in range(count):
            epoch, position = divmod(step * batch + first + row, windows)
            start = permuted(order_key(split, seed if split == "train" else 0, epoch), windows, position) * sequence
            rows[row] = array[start : start + sequence + 1]
        return torch.from_numpy(rows)

    def batch(self, split: Split, seed: int, step: int, batch: int) -> tuple[Tensor, Tensor]:
        """Read the whole mini-batch of a step: tokens and targets, each int64 ``[batch, sequence]``."""
        return self.samples(split, seed, step, 0, batch, batch)


@lru_cache(maxsize=16)
def order_key(split: Split, seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch's order; Python's ``hash`` would differ between processes."""
    digest = hashlib.sha256(f"{split}/{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
