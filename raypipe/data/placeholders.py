"""Check that each row has as many image tokens as its image has features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raypipe.data.arrays import META, Arrays
from raypipe.data.corpus import SPLITS
from raypipe.data.ragged import Column, Ragged
from raypipe.errors import SpecError
from raypipe.graph.values.placeholders import Placeholder


def check_placeholders(directory: Path, wanted: Sequence[Placeholder]) -> None:
    """Check the arrays that were prepared in a folder.

    Raises:
        SpecError: a row has fewer or more of a token than the model puts features in its places.
    """
    if not wanted or not (directory / META).exists():
        return
    arrays = Arrays.open(directory)
    for name, token, each in wanted:
        for split in SPLITS:
            column = arrays.columns[split].get(name)
            if column is None:
                continue
            counts = _counts(column, token)
            wrong = np.flatnonzero(counts != each)
            if len(wrong):
                row = int(wrong[0])
                why = f"row {row} of the {split} rows has {counts[row]} times token {token} in {name}"
                why += f", and its image has {each} features to put there"
                raise SpecError("data", why, f"give each row {each} of them, as the model's processor does")


def _counts(column: Column, token: int) -> npt.NDArray[np.int64]:
    """Return how often each row has a token."""
    if not isinstance(column, Ragged):
        return np.asarray(np.count_nonzero(column == token, axis=tuple(range(1, column.ndim))), np.int64)
    hits = np.concatenate([[0], np.cumsum(column.values == token, dtype=np.int64)])
    found: npt.NDArray[np.int64] = hits[column.offsets[1:]] - hits[column.offsets[:-1]]
    return found
