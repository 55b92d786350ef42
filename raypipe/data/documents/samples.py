"""Any samples of packed documents, by number, from a bounded number of blocks in memory, and the tokens in them."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raypipe.data.documents.sources import Document
from raypipe.data.sample_order import Split, permuted
from raypipe.errors import SpecError, install
from raypipe.files import expanded, parse_json

Tokens = npt.NDArray[Any]
"""Tokens of a block, in the smallest unsigned type that holds every token."""
Packed = Callable[[Iterator[int]], Iterator[Tokens]]
"""Returns the tokens of blocks in the order of their numbers, which it may ask for ahead."""


def samples_in(tokens: int, window: int) -> int:
    """Return the number of samples of ``window`` tokens, and the one that follows, in a block of ``tokens``.

    The last sample ends with the block, and so overlaps the one before it: no token is left out, and none is padding.

    >>> [samples_in(tokens, 4) for tokens in (4, 5, 9, 10)]
    [0, 1, 2, 3]
    """
    return -(-(tokens - 1) // window) if tokens > window else 0


@dataclass(frozen=True)
class BlockWindow:
    """A run of samples that are shuffled among one another."""

    epoch: int
    number: int
    begin: int
    """Number of its first sample, counted over all epochs."""
    tokens: tuple[Tokens, ...]
    """Of its blocks."""
    ends: npt.NDArray[np.int64]
    """Per block, the number of samples in it and in those before it."""

    @property
    def end(self) -> int:
        """Number of the sample after its last one."""
        return self.begin + int(self.ends[-1])


class Windows:
    """Reads samples by number.

    Args:
        order: in which order blocks and samples come.
        size: tokens of a sample, without the one that follows it.
        counts: samples of each block that was read before; those that are read are added.
        packed: reads blocks.
        keep: samples before the newest that is asked for which may still be asked for.
    """

    def __init__(
        self, order: BlockOrder, size: int, counts: MutableMapping[int, int], packed: Packed, keep: int = 0
    ) -> None:
        self._order, self._size, self._counts, self._packed, self._keep = order, size, counts, packed, keep
        self._held: deque[BlockWindow] = deque()
        self._next = (0, 0, 0)
        """Epoch, number and first sample of the window that is read next."""
        self._tokens: Iterator[Tokens] | None = None
        self._all: dict[int, Tokens] = {}
        """All blocks, where they fit a single window, and so are read once."""

    def rows(self, numbers: Sequence[int]) -> Tokens:
        """Return samples, ``[len(numbers), size + 1]``, at least one; numbers count over all epochs.

        Raises:
            SpecError: a file cannot be read, or all of them together hold no sample.
        """
        self._hold(min(numbers), max(numbers))
        return np.stack([self._sample(number) for number in numbers])

    def epoch(self) -> int:
        """Return the number of samples of an epoch; reads the blocks that were never read."""
        self._count([b for n in range(self._order.windows) for b in self._order.window(0, n)])
        return sum(self._counts.values())

    def _sample(self, number: int) -> Tokens:
        window = next(one for one in self._held if one.begin <= number < one.end)
        place = self._order.sample(window.epoch, window.number, int(window.ends[-1]), number - window.begin)
        block = int(np.searchsorted(window.ends, place, side="right"))
        within = place - (int(window.ends[block - 1]) if block else 0)
        tokens = window.tokens[block]
        start = min(within * self._size, len(tokens) - 1 - self._size)
        return tokens[start : start + self._size + 1]

    def _hold(self, first: int, last: int) -> None:
        """Have the windows of samples ``first`` to ``last`` in memory."""
        begin = self._held[0].begin if self._held else self._next[2]
        if first < begin or not self._held:
            self._seek(first)
        while self._next[2] <= last:
            self._read()
            while len(self._held) > 1 and self._held[0].end <= min(first, last - self._keep):
                self._held.popleft()

    def _seek(self, sample: int) -> None:
        """Begin to read at the window of a sample."""
        self._held.clear()
        self._close()
        if len(self._counts) == self._order.blocks:  # else no epoch has been read to its end
            epoch, _ = divmod(sample, self._whole())
            begin = epoch * self._whole()
        else:
            epoch = begin = 0
        number = 0
        while (end := begin + self._count(self._order.window(epoch, number))) <= sample:
            begin, number = end, number + 1
            if number == self._order.windows:
                epoch, number = epoch + 1, 0
                self._whole()
        self._next = (epoch, number, begin)

    def _whole(self) -> int:
        """Return the samples of an epoch, all of whose blocks are known."""
        if total := sum(self._counts.values()):
            return total
        why = f"no block of the {self._order.split} split holds the {self._size + 1} tokens of a sample"
        fix = "give more text, raise data.block_mb, or lower model.sequence"
        raise SpecError("data.held_out" if self._order.split == "val" else "data.path", why, fix)

    def _count(self, blocks: Sequence[int]) -> int:
        unknown = [block for block in blocks if block not in self._counts]
        for block, tokens in zip(unknown, self._packed(iter(unknown)), strict=True):
            self._counts[block] = samples_in(len(tokens), self._size)
        return sum(self._counts[block] for block in blocks)

    def _read(self) -> None:
        """Read the next window."""
        epoch, number, begin = self._next
        blocks = self._order.window(epoch, number)
        if self._order.windows == 1:
            self._all = self._all or dict(zip(blocks, self._packed(iter(blocks)), strict=True))
            tokens = tuple(self._all[block] for block in blocks)
        else:
            if self._tokens is None:
                self._tokens = self._packed(self._visits(epoch, number))
            tokens = tuple(itertools.islice(self._tokens, len(blocks)))
        counts = [samples_in(len(block), self._size) for block in tokens]
        self._counts.update(zip(blocks, counts, strict=True))
        self._held.append(BlockWindow(epoch, number, begin, tokens, np.cumsum(counts)))
        end = begin + sum(counts)
        self._next = (epoch, number + 1, end)
        if number + 1 == self._order.windows:
            self._next = (epoch + 1, 0, end)
            self._whole()

    def _visits(self, epoch: int, number: int) -> Iterator[int]:
        """Yield the blocks from a window on, epoch after epoch."""
        while True:
            yield from self._order.window(epoch, number)
            epoch, number = (epoch, number + 1) if number + 1 < self._order.windows else (epoch + 1, 0)

    def _close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._tokens, "close", None)
        self._tokens = None
        if close is not None:
            close()


# The order of samples: a function of (split, seed, sample number), whatever the plan.
#
# Blocks are visited in an order that is new in each epoch. ``together`` of them at a time make a window, and the
# samples of a window are in an order of their own. So two samples of one block are nearly always far apart, memory
# holds a few blocks, and any sample can be found without reading those before it, once the blocks' numbers of samples
# are known.
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


# From text to tokens, with a tokenizer of Hugging Face's from local files, or byte by byte.


TOKENIZER = "tokenizer.json"
TOGETHER = 256
"""Documents that are tokenised at once."""
FIX = "tokenise with the model's tokenizer"
END = 0
"""Byte that ends a document, where bytes are the tokens."""


class Encoder(Protocol):
    """Turns documents into tokens."""

    tokens: int
    """Number of different tokens."""

    def encode(self, documents: Sequence[Document]) -> list[Sequence[int] | Tokens]:
        """Return the tokens of each document, with one that ends it."""


class Bytes:
    """Each byte is a token."""

    tokens = 256

    def encode(self, documents: Sequence[Document]) -> list[Sequence[int] | Tokens]:
        """Return the bytes of UTF-8."""
        end = bytes([END])
        return [np.frombuffer(str(d.content).encode() + end * d.ends, np.uint8) for d in documents]


class Tokenizer:
    """A tokenizer in the format of Hugging Face's tokenizers, which transformers' fast tokenizers save.

    Args:
        path: ``tokenizer.json``, or the folder that holds it.

    Raises:
        SpecError: there is none, it is damaged, or the package is missing.
    """

    def __init__(self, path: str) -> None:
        place = expanded(Path(path))
        file = place / TOKENIZER if place.is_dir() else place
        if not file.is_file():
            raise SpecError("data.tokenizer", f"{file} does not exist", f"give a local folder with {TOKENIZER}")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # data.num_workers says how many run at once
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise SpecError("data.tokenizer", "needs tokenizers, which is not installed", install("data")) from None
        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:  # the library raises the class Exception itself
            raise SpecError("data.tokenizer", f"{file} holds no tokenizer: {error}", "save it again") from None
        self._fast.no_truncation()
        self._fast.no_padding()
        self.tokens = self._fast.get_vocab_size()
        self.end = _end_of(file.parent)
        self._end: list[int] = []
        if self.end is not None and (number := self._fast.token_to_id(self.end)) is not None:
            self._end = [number]

    def encode(self, documents: Sequence[Document]) -> list[Sequence[int] | Tokens]:
        """Return the tokens of each text, and the tokenizer's ``eos_token`` after its end, if it has one."""
        made = self._fast.encode_batch_fast([str(d.content) for d in documents], add_special_tokens=False)
        return [one.ids + self._end * d.ends for one, d in zip(made, documents, strict=True)]


def _end_of(folder: Path) -> str | None:
    """Return the token that ends a text, as transformers' files beside the tokenizer name it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            end = parse_json((folder / name).read_bytes()).get("eos_token")
            if end is not None:
                return str(end["content"] if isinstance(end, dict) else end)
    return None


class TokenNumbers:
    """Documents that hold token numbers already; ``tokens`` is how many different ones the model knows."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def encode(self, documents: Sequence[Document]) -> list[Sequence[int] | Tokens]:
        """Return the numbers.

        Raises:
            SpecError: one is negative or too large.
        """
        try:
            made = [np.asarray(d.content, np.int64) for d in documents]
        except OverflowError:
            raise SpecError("data.column", f"holds a token beyond 2**63, the model knows {self.tokens}", FIX) from None
        for one in made:
            if one.size and not 0 <= one.min() <= one.max() < self.tokens:
                wrong = int(one[(one < 0) | (one >= self.tokens)][0])
                raise SpecError("data.column", f"holds token {wrong}, the model knows {self.tokens}", FIX)
        return list(made)


@lru_cache(maxsize=4)
def encoder_of(tokenizer: str | None, is_tokens: bool, tokens: int) -> Encoder:
    """Return what makes tokens of documents: see ``Bytes``, ``Tokenizer`` and ``TokenNumbers``."""
    if is_tokens:
        return TokenNumbers(tokens)
    return Bytes() if tokenizer is None else Tokenizer(tokenizer)


def encoded(documents: Iterable[Document], encoder: Encoder) -> Tokens:
    """Return the tokens of all documents, one after another."""
    dtype = np.min_scalar_type(encoder.tokens - 1)
    pieces: list[Tokens] = []
    rest = iter(documents)
    while some := list(islice(rest, TOGETHER)):
        pieces.extend(np.asarray(one).astype(dtype) for one in encoder.encode(some))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
