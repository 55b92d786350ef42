"""The record that a run keeps of its documents: where the blocks are. The documents stay where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from raypipe.data.documents import META
from raypipe.data.documents.samples import BlockOrder, Encoder, Tokens, Windows, encoded, encoder_of, samples_in
from raypipe.data.documents.sources import Block, Document, FilePart, blocks_of, documents_of, find_source, split_of
from raypipe.data.given_files import Format
from raypipe.data.sample_order import SPLITS, Split, sample_keys
from raypipe.errors import SpecError
from raypipe.files import expanded, read_json, write_whole
from raypipe.job import DataSpec, GptSpec, JobSpec
from raypipe.models.task import Task

HELD_OUT = 32
"""Without ``data.held_out``, one document of this many is held out, or the last one of a block that has fewer."""
HELD_OUT_END = 10
"""Of the one document of a block, one part of this many is held out, at its end."""
MIB = 1 << 20
AGAIN = "start a new run"
ANY_TOKENS = 1 << 31
"""Number of tokens that a model is allowed to know, where that is not known before it is built."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of one split."""

    blocks: tuple[Block, ...]
    format: Format
    column: str
    is_tokens: bool
    holds_out: Split | None
    """Which of the documents belong to the split; None for all."""
    tokenizer: str | None
    tokens: int
    """Number of different tokens that the model knows."""
    divides_one: bool = False
    """Whether the end of a block's only document is held out; runs from before that train on all of it."""

    @property
    def encoder(self) -> Encoder:
        """Return the encoder that makes tokens of documents; the same for all that have the same tokenizer."""
        return encoder_of(self.tokenizer, self.is_tokens, self.tokens)

    def packed(self, number: int) -> Tokens:
        """Return the tokens of a block.

        Raises:
            SpecError: a file cannot be read, or a document has no content.
        """
        return encoded(self._documents(self.blocks[number]), self.encoder)

    def _documents(self, block: Block) -> Iterator[Document]:
        result = documents_of(block, self.format, self.column, self.is_tokens)
        if self.holds_out is None:
            yield from result
            return
        held_out = self.holds_out == "val"
        last: Document | None = None
        number = -1
        for number, document in enumerate(result):
            if last is not None and not held_out:
                yield last
            last = document
            if number % HELD_OUT == HELD_OUT - 1:
                if held_out:
                    yield document
                last = None
        if last is not None and number == 0 and self.divides_one:
            yield _part_of(last, held_out)
        elif last is not None and held_out == (0 < number < HELD_OUT - 1):
            yield last


def _part_of(document: Document, held_out: bool) -> Document:
    """Return the end of a document, from a line's begin where it has lines, or what comes before it."""
    content = document.content
    at = len(content) - len(content) // HELD_OUT_END
    if isinstance(content, str):
        at = content.rfind("\n", 0, at) + 1 or at
    return Document(content[at:], document.ends) if held_out else Document(content[:at], False)


def prepare_documents(job: JobSpec, window: int, directory: Path) -> None:
    """Find the documents, divide them into blocks and write these into ``directory``.

    ``window`` is the number of tokens of a sample, without the one that follows it. Only footers and headers are read,
    and the first blocks of each split, to know that they can be.

    Raises:
        SpecError: there are no documents, or too few, or they cannot be read.
    """
    data = job.data
    path, held_out = split_of(data.path)
    held_out = data.held_out or held_out
    tokens = job.model.vocabulary if isinstance(job.model, GptSpec) else ANY_TOKENS
    train = _described(data, path, "data.path", tokens, None if held_out else "train")
    val = (
        train | {"holds_out": "val"} if held_out is None else _described(data, held_out, "data.held_out", tokens, None)
    )
    directory.mkdir(parents=True, exist_ok=True)
    files = sorted({part[0] for one in (train, val) for block in one["blocks"] for part in block})
    about = {
        "source": data.path,
        "sequence": window,
        "shuffle_blocks": data.shuffle_blocks,
        "files": {file: os.path.getsize(file) for file in files},
        "splits": {"train": train, "val": val},
    }
    for split in SPLITS:
        blocks = _blocks(about["splits"][split])  # type: ignore[index]
        _check(blocks, window, tokens, "data.path" if held_out is None or split == "train" else "data.held_out", split)
    write_whole(directory / META, json.dumps(about).encode(), synced=True)


def _described(data: DataSpec, path: str, key: str, tokens: int, holds_out: Split | None) -> dict[str, Any]:
    source = find_source(path, data.column, key)
    if source.is_tokens and data.tokenizer is not None:
        raise SpecError("data.tokenizer", f"{data.column} of {path} holds token numbers already", "leave it out")
    return {
        "blocks": blocks_of(source.parts(data.column), int(data.block_mb * MIB)),
        "format": source.format,
        "column": data.column,
        "is_tokens": source.is_tokens,
        "holds_out": holds_out,
        "tokenizer": None if data.tokenizer is None else str(expanded(Path(data.tokenizer)).resolve()),
        "tokens": tokens,
        "divides_one": True,
    }


def _check(blocks: Blocks, window: int, tokens: int, key: str, split: Split) -> None:
    """Check that a split has a sample, and that the model knows its tokens."""
    if blocks.encoder.tokens > tokens:
        why = f"{tokens}, but {blocks.tokenizer or 'text'} has {blocks.encoder.tokens} tokens"
        raise SpecError("model.vocabulary", why, f"use {blocks.encoder.tokens} or more")
    result = 0
    for number in range(len(blocks.blocks)):
        result = max(result, len(blocks.packed(number)))
        if samples_in(result, window):
            return
    what = "held-out documents" if split == "val" and blocks.holds_out else "documents"
    why = f"too short: no block of the {what} has more than {result} tokens, but a sample takes {window + 1}"
    raise SpecError(key, why, "give more text, or data.held_out, or lower model.sequence")


def _blocks(about: dict[str, Any]) -> Blocks:
    blocks = tuple(tuple(FilePart(*part) for part in block) for block in about["blocks"])
    return Blocks(**about | {"blocks": blocks})


@dataclass(frozen=True)
class PreparedDocuments:
    """The prepared documents of a run."""

    splits: dict[Split, Blocks]
    window: int
    """Tokens of a sample, without the one that follows it."""
    together: int
    """Blocks whose samples are shuffled among one another."""

    @staticmethod
    def open(directory: Path, check: bool = True) -> PreparedDocuments:
        """Read what ``prepare_documents`` wrote; ``check``: whether to look at the files, too.

        Raises:
            SpecError: it is damaged, or a file has changed since.
        """
        path = directory / META
        try:
            about = read_json(path)
            splits: dict[Split, Blocks] = {split: _blocks(about["splits"][split]) for split in SPLITS}
            files, window, together = dict(about["files"]), int(about["sequence"]), int(about["shuffle_blocks"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SpecError(str(path), f"is damaged: {error}", AGAIN) from None
        for file, size in files.items() if check else ():
            if not os.path.isfile(file) or os.path.getsize(file) != size:
                changed = "has changed since the run began" if os.path.exists(file) else "is gone"
                raise SpecError("data.path", f"{file} {changed}", f"bring it back, or {AGAIN}")
        return PreparedDocuments(splits, window, together)


# Documents as a dataset that this process reads by itself, for profiling and for one device.
#
# A run reads them through Ray Data instead: ``runtime/worker/samples``. Both give the same samples.
class Documents:
    """Packed documents as the raw inputs of a task.

    Args:
        directory: folder of the prepared data.
        task: makes raw inputs of tokens.
        whole: whether to read all blocks; else the first one alone, over and over, for measurements that need some
            samples and not these.
    """

    def __init__(self, directory: Path, task: Task, whole: bool = True) -> None:
        self._directory, self._task, self._whole = directory, task, whole
        self._windows: dict[tuple[Split, int], Windows] = {}

    @cached_property
    def _prepared(self) -> PreparedDocuments:
        return PreparedDocuments.open(self._directory)

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return the samples of a step as the task's raw inputs."""
        rows = self._of(split, seed).rows(range(step * batch, (step + 1) * batch))
        return self._task.from_text(from_numpy(rows.astype(np.int64)), sample_keys(split, seed, step, batch))

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return nothing, because samples are equally long."""
        return {}

    def samples(self, split: Split) -> int:
        """Return the number of samples of an epoch; reads all documents, the first time."""
        return self._of(split, 0).epoch()

    def _of(self, split: Split, seed: int) -> Windows:
        result = self._windows.get((split, seed))
        if result is None:
            blocks = self._prepared.splits[split]

            def packed(numbers: Iterator[int]) -> Iterator[Tokens]:
                return map(blocks.packed, numbers) if self._whole else (_first(self._directory, split) for _ in numbers)

            order = BlockOrder(split, seed, len(blocks.blocks) if self._whole else 1, self._prepared.together)
            result = self._windows[split, seed] = Windows(order, self._prepared.window, {}, packed)
        return result


@lru_cache(maxsize=2)
def _first(directory: Path, split: Split) -> Tokens:
    """Return the tokens of the first block that holds a sample; kept, because a measurement opens the data often."""
    prepared = PreparedDocuments.open(directory)
    blocks = prepared.splits[split]
    packed = map(blocks.packed, range(len(blocks.blocks)))
    return next(tokens for tokens in packed if samples_in(len(tokens), prepared.window))
