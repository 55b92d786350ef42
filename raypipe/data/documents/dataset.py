"""Documents as a dataset that this process reads by itself, for profiling and for one device.

A run reads them through Ray Data instead: ``runtime/samples``. Both give the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from raypipe.data.documents.order import BlockOrder
from raypipe.data.documents.prepared import Prepared
from raypipe.data.documents.tokens import Tokens
from raypipe.data.documents.windows import Windows
from raypipe.data.sample_order import Split, sample_keys
from raypipe.models.task import Task


class Documents:
    """Packed documents as the raw inputs of a task."""

    def __init__(self, directory: Path, task: Task) -> None:
        self._directory, self._task = directory, task
        self._windows: dict[tuple[Split, int], Windows] = {}

    @cached_property
    def _prepared(self) -> Prepared:
        return Prepared.open(self._directory)

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
        found = self._windows.get((split, seed))
        if found is None:
            blocks = self._prepared.splits[split]

            def packed(numbers: Iterator[int]) -> Iterator[Tokens]:
                return map(blocks.packed, numbers)

            order = BlockOrder(split, seed, len(blocks.blocks), self._prepared.together)
            found = self._windows[split, seed] = Windows(order, self._prepared.window, {}, packed)
        return found
