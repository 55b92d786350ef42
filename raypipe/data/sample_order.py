"""The order in which an epoch visits its samples: a permutation that is computed when needed and never stored.

A Feistel network permutes the numbers below a power of four. Numbers that land outside the wanted range are permuted
again until they land inside, which keeps it a permutation ("cycle walking", Black and Rogaway 2002). Any process can
find any sample's place in constant memory, whatever the size of the corpus.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from raypipe.errors import SpecError
from raypipe.files import expanded, whole
from raypipe.models.keyed_random import fold64

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")
ORDER = "order.npy"
"""The order of rows that a job gives (``data.order``), beside the rows."""
BLOCK = 4096
"""Number of places computed and cached together, because a step needs neighbouring ones."""
ROUNDS = 4
TOGETHER = 50
"""Mini-batches of a piece that is sorted by length, where an epoch has at least four times as many."""
_UINT = np.uint64
_MASK64 = (1 << 64) - 1

Numbers = npt.NDArray[np.uint64]


def sample_keys(split: Split, seed: int, step: int, batch: int) -> list[int]:
    """Return a 64-bit random key per sample, for tasks that draw random numbers."""
    base = fold64(seed, 0, step) if split == "train" else fold64(0, 1, step)
    return [fold64(base, row) for row in range(batch)]


def permuted(key: int, size: int, position: int) -> int:
    """Return the image of ``position`` under the permutation of ``range(size)`` that ``key`` (64 bits) selects."""
    block, offset = divmod(position, BLOCK)
    return int(_block(key & _MASK64, size, block)[offset])


def permutation(key: int, size: int) -> npt.NDArray[np.int64]:
    """Return the whole permutation of ``range(size)`` that ``key`` selects; see ``permuted``."""
    return np.concatenate([_block(key & _MASK64, size, block) for block in range(-(-size // BLOCK))])


class GroupedByLength:
    """An order of an epoch's rows in which neighbours have similar lengths.

    The shuffled rows are cut into pieces of ``TOGETHER`` mini-batches, and each is sorted, the longest row first, as
    ``transformers.trainer_pt_utils.LengthGroupedSampler`` does.

    Args:
        lengths: of every row.
    """

    def __init__(self, lengths: npt.NDArray[np.int64]) -> None:
        self._lengths = lengths
        self._piece = lru_cache(maxsize=4)(self._sorted)

    def place(self, key: int, position: int, batch: int) -> int:
        """Return the row at a position of the epoch that ``key`` selects, with mini-batches of ``batch`` rows."""
        size = len(self._lengths)
        rows = max(1, min(size // (batch * 4), TOGETHER)) * batch
        piece, offset = divmod(position, rows)
        return int(self._piece(key, piece * rows, min(size, (piece + 1) * rows))[offset])

    def _sorted(self, key: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        rows = np.array([permuted(key, len(self._lengths), position) for position in range(begin, end)])
        order = np.argsort(-self._lengths[rows], kind="stable")
        result: npt.NDArray[np.int64] = rows[order]
        return result


@lru_cache(maxsize=8)
def _block(key: int, size: int, block: int) -> npt.NDArray[np.int64]:
    """Return the images of one block of positions."""
    start = block * BLOCK
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    images = _feistel(np.arange(start, min(start + BLOCK, size), dtype=_UINT), key, half)
    # The domain is less than four times the range, so few walks are long; each ends, because its cycle returns.
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], key, half)
    return images.astype(np.int64)


def _feistel(numbers: Numbers, key: int, half: int) -> Numbers:
    """Permute the numbers below ``4 ** half``; each round swaps the halves and mixes one into the other."""
    mask = _UINT((1 << half) - 1)
    left, right = numbers >> _UINT(half), numbers & mask
    for number in range(ROUNDS):
        salt = _UINT((key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK64)
        left, right = right, left ^ (_mix(right + salt) & mask)
    return left << _UINT(half) | right


def _mix(numbers: Numbers) -> Numbers:
    """Apply splitmix64's finaliser; arithmetic wraps."""
    numbers = (numbers ^ (numbers >> _UINT(30))) * _UINT(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> _UINT(27))) * _UINT(0x94D049BB133111EB)
    return numbers ^ (numbers >> _UINT(31))


@lru_cache(maxsize=16)
def order_key(split: Split, seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch's order; Python's ``hash`` would differ between processes."""
    digest = hashlib.sha256(f"{split}/{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def write_order(order: npt.NDArray[np.int64], directory: Path) -> Path:
    """Write the order of the training rows, ``[steps, batch]``, beside them, and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    with whole(directory / ORDER) as partial, partial.open("wb") as out:
        np.save(out, order, allow_pickle=False)
    return directory / ORDER


def read_order(source: str, rows: int) -> npt.NDArray[np.int64]:
    """Read the order of the rows of training.

    Raises:
        SpecError: it is no ``.npy`` file of integers ``[steps, batch]``, a step has no row, or a number is of no row.
    """
    fix = "give an .npy file of row numbers, [steps, batch], each step's from its first place on, below 0 for none"
    try:
        order = np.load(expanded(Path(source)), allow_pickle=False)
        if order.ndim != 2 or order.dtype.kind not in "iu" or not order.size:
            raise ValueError(f"it has shape {list(order.shape)} of {order.dtype}")
    except (OSError, ValueError, EOFError, AttributeError) as error:
        raise SpecError("data.order", f"{source} cannot be used: {error}", fix) from None
    if order.max() >= rows or (order[:, 0] < 0).any():
        why = f"row {order.max()}, but there are {rows}" if order.max() >= rows else "a step without rows"
        raise SpecError("data.order", f"{source} has {why}", fix)
    return np.asarray(order, dtype=np.int64)
