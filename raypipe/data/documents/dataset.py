"""Documents as a dataset that this process reads by itself, for profiling and for one device.

A run reads them through Ray Data instead: ``runtime/samples``. Both give the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

from raypipe.data.documents.order import BlockOrder
from raypipe.data.documents.prepared import Prepared
from raypipe.data.documents.tokens import Tokens
from raypipe.data.documents.windows import Windows, samples_in
from raypipe.data.sample_order import Split, sample_keys
from raypipe.models.task import Task


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
                return map(blocks.packed, numbers) if self._whole else (_first(self._directory, split) for _ in numbers)

            order = BlockOrder(split, seed, len(blocks.blocks) if self._whole else 1, self._prepared.together)
            found = self._windows[split, seed] = Windows(order, self._prepared.window, {}, packed)
        return found


@lru_cache(maxsize=2)
def _first(directory: Path, split: Split) -> Tokens:
    """Return the tokens of the first block that holds a sample; kept, because a measurement opens the data often."""
    prepared = Prepared.open(directory)
    blocks = prepared.splits[split]
    packed = map(blocks.packed, range(len(blocks.blocks)))
    return next(tokens for tokens in packed if samples_in(len(tokens), prepared.window))
