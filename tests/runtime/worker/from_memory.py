"""Documents without the stream, for the plain loop."""

from __future__ import annotations

from pathlib import Path

from raypipe.data import Corpus, open_data
from raypipe.models.task import NextToken


class FromMemory(Corpus):
    """Samples of documents that this process reads by itself, for the plain loop."""

    def __init__(self, folder: Path) -> None:
        object.__setattr__(self, "data", open_data(folder, NextToken()))

    def samples(self, split, seed, step, first, count, batch):
        rows = self.data.batch(split, seed, step, batch)
        return rows["input_ids"][first : first + count], rows["shift_labels"][first : first + count]
