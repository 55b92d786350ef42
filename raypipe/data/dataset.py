"""What training data looks like to a device: raw inputs by name, for any sample of any step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.arrays import META as ARRAYS
from raypipe.data.arrays import Arrays, mask_of, mean_tokens, prepare_arrays
from raypipe.data.corpus import META as CORPUS
from raypipe.data.corpus import Corpus, Split
from raypipe.data.lines import LINE, prepare_lines
from raypipe.data.lines import META as LINES
from raypipe.data.prepare import END, prepare
from raypipe.data.ragged import Ragged, fill_of
from raypipe.job import JobSpec
from raypipe.models.keyed_random import fold64
from raypipe.models.task import MASK, Task


class Dataset(Protocol):
    """Prepared data in a run directory; every device opens it for itself."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """The whole mini-batch of a step, one row per sample.

        Depends on these arguments alone; held-out samples not on the seed, so that validation losses compare. Samples
        of their own lengths are padded to the longest.
        """

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> Mapping[str, npt.NDArray[np.int64]]:
        """Of each raw input whose samples have their own lengths: to what each of ``batch`` is padded alone.

        A micro-batch takes the largest among its samples'. Empty where all samples are equally long.
        """


class Text:
    """Text as the raw inputs of a task."""

    def __init__(self, corpus: Corpus, task: Task) -> None:
        self.corpus, self.task = corpus, task

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Windows of the text, as the task wants them."""
        rows = self.corpus.rows(split, seed, step, 0, batch, batch)
        return self.task.from_text(rows, sample_keys(split, seed, step, batch))

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Windows are equally long."""
        return {}


def sample_keys(split: Split, seed: int, step: int, batch: int) -> list[int]:
    """A 64-bit random number per sample, for what a task draws."""
    base = fold64(seed, 0, step) if split == "train" else fold64(0, 1, step)
    return [fold64(base, row) for row in range(batch)]


class Table:
    """The user's arrays, and what the task makes of them; lengths are rounded up to ``multiple``."""

    def __init__(
        self, arrays: Arrays, task: Task, multiple: int = 1, fields: Collection[str] | None = None
    ) -> None:  # fmt: skip
        self.arrays, self.task, self.multiple = arrays, task, multiple
        self.skipped = frozenset() if fields is None else arrays.measures() - {*fields, "labels"}
        """Columns that are not read: images and the like of other devices; nothing follows from them."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Rows of the arrays."""
        rows = self.arrays.batch(split, seed, step, batch, self.multiple, self.task.padding, self.skipped)
        return self.task.complete(rows)

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Of the rows, and of what follows from them."""
        return self.task.complete_lengths(self.arrays.lengths(split, seed, step, batch, self.multiple))


class Lines:
    """Lines of text as the raw inputs of a task, each a sample of its own length."""

    def __init__(self, arrays: Arrays, task: Task, multiple: int = 1) -> None:
        self.arrays, self.task, self.multiple = arrays, task, multiple
        self.names = (*task.text_fields(1), MASK)

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Bytes of the lines; the one that follows the last is ``END``."""
        column = self.arrays.columns[split][LINE]
        assert isinstance(column, Ragged)
        at = self.arrays.places(split, seed, step, batch)
        length = int(self.arrays.lengths(split, seed, step, batch, self.multiple)[LINE].max())
        rows = torch.from_numpy(column.padded(at, length + 1, END[0]).astype(np.int64))
        made = self.task.from_text(rows, sample_keys(split, seed, step, batch))
        mask = mask_of(column, at, length)
        return {n: t.masked_fill(mask == 0, fill_of(n, self.task.padding)) for n, t in made.items()} | {MASK: mask}

    def lengths(self, split: Split, seed: int, step: int, batch: int) -> dict[str, npt.NDArray[np.int64]]:
        """Bytes of each line, rounded up."""
        own = self.arrays.lengths(split, seed, step, batch, self.multiple)[LINE]
        return dict.fromkeys(self.names, own)


def open_data(directory: Path, task: Task, multiple: int = 1, fields: Collection[str] | None = None) -> Dataset:
    """The data that was prepared in a directory, for a task; ``multiple`` is ``data.pad_to_multiple_of``.

    ``fields`` are the raw inputs that are wanted, of which there may be more than asked for; None for all.

    Raises:
        SpecError: there is none.
    """
    if (directory / ARRAYS).exists():
        return Table(Arrays.open(directory), task, multiple, fields)
    if (directory / LINES).exists():
        return Lines(Arrays.open(directory, LINES), task, multiple)
    return Text(Corpus.open(directory), task)


def prepare_data(job: JobSpec, task: Task, directory: Path) -> None:
    """Lay out a job's data in ``directory`` for every device to read.

    Raises:
        SpecError: there is none, or too little.
    """
    if job.data.type == "arrays":
        prepare_arrays(job.data, directory, task.per_token)
        return
    assert job.model.sequence is not None, "checked with the job"
    if job.data.type == "lines":
        prepare_lines(job.data, job.model.sequence, directory)
    else:
        prepare(job.data, task.window(job.model.sequence), directory)


def tokens_per_sample(job: JobSpec, directory: Path) -> float:
    """What throughput counts of the data that was prepared in a directory: tokens, without what pads them."""
    found = mean_tokens(directory, LINE, LINES) if job.data.type == "lines" else mean_tokens(directory)
    return job.tokens_per_sample if found is None else found


def counts_tokens(job: JobSpec, directory: Path) -> bool:
    """Whether that is tokens: samples of arrays are counted as one each, unless they have lengths of their own."""
    return job.data.type != "arrays" or mean_tokens(directory) is not None


def is_prepared(directory: Path) -> bool:
    """Whether ``prepare_data`` has finished there."""
    return any((directory / meta).exists() for meta in (ARRAYS, LINES, CORPUS))
