"""From text to tokens, with a tokenizer of Hugging Face's from local files, or byte by byte."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raypipe.data.documents.read import Document
from raypipe.errors import SpecError, install
from raypipe.files import expanded, parse_json

Tokens = npt.NDArray[Any]
"""Tokens of a block, in the smallest unsigned type that holds every token."""
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
