"""Rows into which several documents are packed, as their ``position_ids`` say."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from raypipe.data.ragged import Column, Ragged
from raypipe.errors import SpecError
from raypipe.models.task import MASK, POSITIONS


def is_packed(*parts: Mapping[str, Column]) -> bool:
    """Return whether the positions of any row restart.

    Without a mask, as transformers has it, another document begins wherever a position is not the one before plus 1.
    Beside a mask of tokens it begins where a row's first position, or a lower one, comes again. A mask of pairs of
    tokens says itself which see each other.

    Args:
        parts: columns by name; of one model, which has the mask of all of them or of none.

    Raises:
        SpecError: positions restart, and the mask hides other tokens than padding.
    """
    found = [_restarts(columns) for columns in parts]
    packed = any(restarts for restarts, _ in found)
    hidden = next((row for _, row in found if row is not None), None)
    if packed and hidden is not None:
        why = f"{MASK} of row {hidden} hides the beginning of a document, and {POSITIONS} restart within rows"
        raise SpecError("data", why, f"leave {MASK} out: documents whose {POSITIONS} restart do not see each other")
    return packed


def _restarts(columns: Mapping[str, Column]) -> tuple[bool, int | None]:
    """Return whether positions restart, and a row whose mask hides a token that belongs to the one after it."""
    if POSITIONS not in columns:
        return False, None
    positions, offsets = _flat(columns[POSITIONS])
    if positions is None:
        return False, None
    same = np.ones(max(0, len(positions) - 1), dtype=bool)  # whether a token and the one after it are of one row
    same[offsets[1:-1] - 1] = False
    jumps = same & (np.diff(positions) != 1)
    if MASK not in columns:
        return bool(jumps.any()), None
    mask = _flat(columns[MASK])[0]
    if mask is None or len(mask) != len(positions):
        return False, None
    own = mask != 0
    first = np.repeat(_first(positions, own, offsets), np.diff(offsets))
    restarts = jumps & own[:-1] & own[1:] & (positions[1:] <= first[1:])
    hidden = np.flatnonzero(same & ~jumps & ~own[:-1] & own[1:])
    row = int(np.searchsorted(offsets, int(hidden[0]), "right")) - 1 if len(hidden) else None
    return bool(restarts.any()), row


def _first(
    positions: npt.NDArray[np.int64], own: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the position of each row's first token that the mask shows; of none, that of its first."""
    shown = np.flatnonzero(own)
    at = np.searchsorted(shown, offsets[:-1])
    found = shown[np.minimum(at, len(shown) - 1)] if len(shown) else offsets[:-1]
    return positions[np.where((found >= offsets[:-1]) & (found < offsets[1:]), found, offsets[:-1])]


def _flat(column: Column) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]:
    """Return the values of all rows, and where each begins; no values unless there is one per token."""
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.kind not in "bui" or values.ndim != (1 if isinstance(column, Ragged) else 2) or not values.size:
        return None, np.zeros(1, dtype=np.int64)
    offsets = column.offsets if isinstance(column, Ragged) else np.arange(len(values) + 1) * values.shape[1]
    return values.reshape(-1).astype(np.int64), offsets
