"""What training data looks like to a device: raw inputs by name, for any sample of any step."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from raypipe.data.arrays import META as ARRAYS
from raypipe.data.arrays import Arrays, prepare_arrays
from raypipe.data.corpus import META as CORPUS
from raypipe.data.corpus import Corpus, Split
from raypipe.data.prepare import prepare
from raypipe.job import JobSpec
from raypipe.models.keyed_random import fold64
from raypipe.models.task import Task


class Dataset(Protocol):
    """Prepared data in a run directory; every device opens it for itself."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """The whole mini-batch of a step, one row per sample.

        Depends on these arguments alone; held-out samples not on the seed, so that validation losses compare.
        """


class Text:
    """Text as the raw inputs of a task."""

    def __init__(self, corpus: Corpus, task: Task) -> None:
        self.corpus, self.task = corpus, task

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Windows of the text, as the task wants them."""
        rows = self.corpus.rows(split, seed, step, 0, batch, batch)
        base = fold64(seed, 0, step) if split == "train" else fold64(0, 1, step)
        return self.task.from_text(rows, [fold64(base, row) for row in range(batch)])


class Table:
    """The user's arrays, and what the task makes of them."""

    def __init__(self, arrays: Arrays, task: Task) -> None:
        self.arrays, self.task = arrays, task

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Rows of the arrays."""
        return self.task.complete(self.arrays.batch(split, seed, step, batch))


def open_data(directory: Path, task: Task) -> Dataset:
    """The data that was prepared in a directory, for a task.

    Raises:
        SpecError: there is none.
    """
    if (directory / ARRAYS).exists():
        return Table(Arrays.open(directory), task)
    return Text(Corpus.open(directory), task)


def prepare_data(job: JobSpec, task: Task, directory: Path) -> None:
    """Lay out a job's data in ``directory`` for every device to read.

    Raises:
        SpecError: there is none, or too little.
    """
    if job.data.type == "arrays":
        prepare_arrays(job.data, directory)
    else:
        assert job.model.sequence is not None, "checked with the job"
        prepare(job.data, task.window(job.model.sequence), directory)


def is_prepared(directory: Path) -> bool:
    """Whether ``prepare_data`` has finished there."""
    return (directory / ARRAYS).exists() or (directory / CORPUS).exists()
