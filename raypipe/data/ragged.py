"""Ragged rows, such as the tokens of sentences: stored concatenated, and padded when they are read.

In a file of named arrays, ``NAME`` holds the values of all rows, and ``NAME.offsets`` (rows + 1 integers, from 0) where
each begins. ``NAME.fill``, one number, is the padding value, if it is not the one that the name implies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raypipe.errors import SpecError
from raypipe.models.task import IGNORED, MASK, POSITIONS

Values = npt.NDArray[Any]
OFFSETS, FILL = ".offsets", ".fill"
TOKENS = "input_ids"
BESIDE = frozenset({MASK, "token_type_ids", "position_ids", "shift_labels"})
"""Fields that have one value per token."""


@dataclass(frozen=True)
class Ragged:
    """One field of some samples, with the rows concatenated."""

    values: Values
    """``[total, ...]``"""
    offsets: npt.NDArray[np.int64]
    """``[rows + 1]``; row i is ``values[offsets[i]:offsets[i + 1]]``."""
    fill: int | None = None
    """Padding value; None for the one that the field's name implies (``fill_of``)."""

    @staticmethod
    def of(rows: Sequence[Values], fill: int | None = None) -> Ragged:
        """Concatenate rows whose shapes differ only in the first size."""
        return Ragged(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64), fill)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the length of every row."""
        return np.diff(self.offsets)

    def longest(self) -> int:
        """Return the length of the longest row."""
        return int(self.lengths().max())

    def lengths_at(self, places: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the lengths of some rows."""
        at = np.asarray(places)
        found: npt.NDArray[np.int64] = self.offsets[at + 1] - self.offsets[at]
        return found

    def taken(self, places: npt.NDArray[np.int64]) -> Ragged:
        """Select some rows."""
        return Ragged.of([self.values[self.offsets[i] : self.offsets[i + 1]] for i in places], self.fill)

    def padded(self, places: Sequence[int], length: int, fill: int) -> Values:
        """Return some rows as one array ``[len(places), length, ...]``, padded at the end with ``fill``."""
        made = np.full((len(places), length, *self.values.shape[1:]), fill, self.values.dtype)
        for row, i in zip(made, places, strict=True):
            begin, end = self.offsets[i], self.offsets[i + 1]
            row[: end - begin] = self.values[begin:end]
        return made


Column = Values | Ragged
"""One field of all samples."""


def fill_of(name: str, padding: int) -> int:
    """Return a field's padding value: the model's padding token for tokens, ``IGNORED`` for labels, 0 for others."""
    if name in ("labels", "shift_labels"):
        return IGNORED
    return padding if name in (TOKENS, "decoder_input_ids") else 0


def classes(lengths: npt.NDArray[np.int64], multiple: int, longest: int) -> npt.NDArray[np.int64]:
    """Round lengths up to a multiple, but not beyond the longest row, so that there are few different shapes.

    >>> classes(np.array([3, 8, 9, 20]), 8, 20).tolist()
    [8, 8, 16, 20]
    """
    return np.minimum(-(-lengths // multiple) * multiple, longest)


def joined(arrays: Mapping[str, Values], key: str) -> dict[str, Column]:
    """Turn a file's arrays into columns; ``key`` is the job's key that names the file.

    Raises:
        SpecError: offsets do not fit their values, a row is empty, or rows cannot be padded.
    """
    made: dict[str, Column] = {n: a for n, a in arrays.items() if not n.endswith((OFFSETS, FILL))}
    for name in [n for n in arrays if n.endswith((OFFSETS, FILL))]:
        owner, _, kind = name.rpartition(".")
        if owner not in made or f"{owner}{OFFSETS}" not in arrays:
            raise SpecError(key, f"{name} has no rows that it belongs to", f"give {owner} and {owner}{OFFSETS}")
        if kind == "fill":
            continue
        offsets = arrays[name]
        values = arrays[owner]
        end = int(offsets[-1]) if offsets.ndim == 1 and offsets.dtype.kind in "ui" and len(offsets) > 1 else -1
        if end < 0 or offsets[0] != 0 or values.ndim < 1 or end != len(values):
            why = f"{name} does not say where the rows of {owner} begin and end"
            raise SpecError(key, why, "give rows + 1 whole numbers, from 0 to the number of values")
        fill = arrays.get(f"{owner}{FILL}")
        if fill is not None and (fill.size != 1 or fill.dtype.kind not in "ui"):
            raise SpecError(key, f"{owner}{FILL} is not one whole number", "give the padding value, such as 0")
        made[owner] = Ragged(values, offsets.astype(np.int64), None if fill is None else int(fill.item()))
        check_rows(owner, made[owner], key)
    return made


def check_rows(name: str, column: Column, key: str) -> None:
    """Check that a column can be padded, if it is ragged.

    Raises:
        SpecError: a row is empty, or the values are not integers or booleans.
    """
    if not isinstance(column, Ragged):
        return
    short = np.flatnonzero(column.lengths() < 1)
    if len(short):
        raise SpecError(key, f"{name} of row {short[0]} is empty", "leave out rows without values")
    if column.values.dtype.kind not in "bui":
        why = f"the rows of {name} differ in length and hold {column.values.dtype}, which is not padded"
        raise SpecError(key, why, "make them equally long; only whole numbers (tokens) are padded")


def check_beside(columns: Mapping[str, Column], labels: bool, key: str) -> None:
    """Check that fields with one value per token are as long as the tokens; ``labels`` says whether labels are such.

    Raises:
        SpecError: in a row, a field's length differs from the number of tokens.
    """
    tokens = columns.get(TOKENS)
    if not isinstance(tokens, Ragged):
        return
    for name in sorted((BESIDE | {"labels"} if labels else BESIDE) & columns.keys()):
        column = columns[name]
        own = column.lengths() if isinstance(column, Ragged) else np.full(len(column), (*column.shape, 1)[1])
        wrong = np.flatnonzero(own != tokens.lengths())
        if len(wrong):
            row = int(wrong[0])
            why = f"row {row} has {tokens.lengths()[row]} {TOKENS} and {own[row]} {name}"
            raise SpecError(key, why, f"give one value of {name} per token")


def of_one_form(a: Mapping[str, Column], b: Mapping[str, Column]) -> tuple[dict[str, Column], dict[str, Column]]:
    """Make columns of ``a`` and ``b`` both ragged where one is: in the other, rows may happen to be equally long."""
    return _as_in(a, b), _as_in(b, a)


def _as_in(columns: Mapping[str, Column], others: Mapping[str, Column]) -> dict[str, Column]:
    made = dict(columns)
    for name, column in columns.items():
        other = others.get(name)
        if isinstance(other, Ragged) and not isinstance(column, Ragged) and column.ndim > 1:
            rows, length = column.shape[:2]
            offsets = np.arange(rows + 1, dtype=np.int64) * length
            made[name] = Ragged(column.reshape(-1, *column.shape[2:]), offsets, other.fill)
    return made


def flat(columns: Mapping[str, Column]) -> dict[str, Values]:
    """Turn columns into arrays; the inverse of ``joined``."""
    made: dict[str, Values] = {}
    for name, column in columns.items():
        if not isinstance(column, Ragged):
            made[name] = column
            continue
        made |= {name: column.values, f"{name}{OFFSETS}": column.offsets}
        if column.fill is not None:
            made[f"{name}{FILL}"] = np.int64(column.fill)  # type: ignore[assignment]
    return made


# Rows into which several documents are packed, as their ``position_ids`` say.


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
