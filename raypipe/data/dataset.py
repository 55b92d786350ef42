"""What training data looks like to a device: raw inputs by name, for any sample of any step."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from raypipe.data.corpus import Corpus, Split
from raypipe.job import JobSpec


class Dataset(Protocol):
    """Prepared data in a run directory; every device opens it for itself."""

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """The whole mini-batch of a step, one row per sample.

        Depends on these arguments alone; held-out samples not on the seed, so that validation losses compare.
        """


class NextByte:
    """Text for next-token prediction: ``input_ids`` and ``shift_labels``, each int64 ``[batch, sequence]``."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Windows of the text, and the same shifted by one."""
        tokens, targets = self.corpus.batch(split, seed, step, batch)
        return {"input_ids": tokens, "shift_labels": targets}


def open_data(job: JobSpec, directory: Path) -> Dataset:
    """The data that was prepared for a job.

    Raises:
        SpecError: there is none.
    """
    return NextByte(Corpus.open(directory))
