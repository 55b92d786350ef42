"""The rows of a script's datasets, written into the run's directory as plain arrays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raypipe.atomic_write import whole
from raypipe.trainer.datasets import Columns

if TYPE_CHECKING:
    from raypipe.data.rows import Collator


def write_rows(chosen: Columns, name: str, directory: Path, collator: Collator | None, seed: int, resume: bool) -> Path:
    """Write the rows of the dataset ``name``, and return the file.

    With ``resume`` the rows that are there stay: the order of the samples follows from them.

    Raises:
        SpecError: the rows are not what they should be.
    """
    path = directory / "datasets" / f"{name}.npz"
    if resume and path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    from raypipe.data import columns_of, flat

    chosen.check(f"{name}_dataset")
    columns = columns_of(chosen, f"{name}_dataset", collator, seed)
    with whole(path) as partial, partial.open("wb") as out:
        np.savez(out, **flat(columns))  # type: ignore[arg-type]
    return path


def differ_in_length(path: Path) -> bool:
    """Return whether rows of a file that ``write_rows`` wrote have unequal numbers of tokens."""
    from raypipe.data.ragged import OFFSETS, TOKENS

    with np.load(path) as held:
        return TOKENS + OFFSETS in held.files
