"""Ragged rows, such as the tokens of sentences: stored concatenated, and padded when they are read.

In a file of named arrays, ``NAME`` holds the values of all rows, and ``NAME.offsets`` (rows + 1 integers, from 0) where
each begins. ``NAME.fill``, one number, is the padding value, if it is not the one that the name implies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

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
        result: npt.NDArray[np.int64] = self.offsets[at + 1] - self.offsets[at]
        return result

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


def fitted(columns: Mapping[str, Column], most: int, how: str, key: str) -> Mapping[str, Column]:
    """Return documents of at most ``most`` tokens each.

    Args:
        columns: the documents, one a row.
        most: tokens.
        how: ``data.long_documents``.
        key: the job's key that names the documents.

    Raises:
        SpecError: one is too long and ``how`` refuses it, or none is left.
    """
    flat = {name: ragged(column) for name, column in columns.items()}
    lengths = flat[TOKENS].lengths() if TOKENS in flat else np.zeros(0, np.int64)
    long = np.flatnonzero(lengths > most)
    if MASK in flat and not flat[MASK].values.all():
        raise SpecError(key, f"{MASK} hides tokens of documents that are to be packed", "leave these tokens out")
    if not len(long):
        return columns
    if how == "refuse":
        row = int(long[0])
        why = f"document {row} has {lengths[row]} tokens and a row holds {most} (train.microbatch_tokens)"
        more = f"; {len(long)} of {len(lengths)} documents are longer" if len(long) > 1 else ""
        fix = f"raise microbatch_tokens to {int(lengths.max())}, or set data.long_documents to split, truncate or drop"
        raise SpecError(key, why + more, fix)
    parts: list[tuple[int, int]] = []
    for begin, length in zip(flat[TOKENS].offsets[:-1].tolist(), lengths.tolist(), strict=True):
        if length <= most:
            parts.append((begin, begin + length))
        elif how != "drop":
            last = length if how == "split" else most
            parts += [(begin + at, begin + min(at + most, last)) for at in range(0, last, most)]
    if not parts:
        raise SpecError(key, f"every document has more than {most} tokens, and all are dropped", "split them instead")
    return {name: Ragged.of([c.values[a:b] for a, b in parts], c.fill) for name, c in flat.items()}


def ragged(column: Column) -> Ragged:
    """Return a column of one value for each token as a ragged one."""
    if isinstance(column, Ragged):
        return column
    rows, length = column.shape[:2]
    return Ragged(column.reshape(rows * length), np.arange(rows + 1, dtype=np.int64) * length)


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
    result = [_restarts(columns) for columns in parts]
    packed = any(restarts for restarts, _ in result)
    hidden = next((row for _, row in result if row is not None), None)
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
    result = shown[np.minimum(at, len(shown) - 1)] if len(shown) else offsets[:-1]
    return positions[np.where((result >= offsets[:-1]) & (result < offsets[1:]), result, offsets[:-1])]


def _flat(column: Column) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]:
    """Return the values of all rows, and where each begins; no values unless there is one per token."""
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype.kind not in "bui" or values.ndim != (1 if isinstance(column, Ragged) else 2) or not values.size:
        return None, np.zeros(1, dtype=np.int64)
    offsets = column.offsets if isinstance(column, Ragged) else np.arange(len(values) + 1) * values.shape[1]
    return values.reshape(-1).astype(np.int64), offsets


# Turn a Python dataset of dicts into columns.


class Rows(Protocol):
    """A map-style dataset: rows of named tensors, arrays or numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


Collator = Callable[[list[Any]], Mapping[str, Any]]
"""A function that makes a batch of rows, as in transformers and torch."""
_ENDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")
BOUNDARIES = {*_ENDS, "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen"}
"""What a collator returns of packed documents, of a batch as a whole, for kernels of attention on GPUs."""


def columns_of(rows: Rows, where: str, collator: Collator | None = None, seed: int = 0) -> dict[str, Column]:
    """Return the rows of a dataset as one column per name; shapes of rows may differ only in the first size.

    Args:
        rows: the dataset.
        where: its name in errors.
        collator: called once on every row alone. Its padding value is found from one call on the shortest and the
            longest row together.
        seed: of torch's generator while the dataset and the collator are called.

    Raises:
        SpecError: there are no rows; rows are not dicts of numbers, are empty, or differ in names or in other sizes;
            or the collator fails, pads on the left, or pads with more than one value.
    """
    if not len(rows):
        raise SpecError(where, "holds no rows", "give a dataset of dicts")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _columns(rows, where, collator)


def _columns(rows: Rows, where: str, collator: Collator | None) -> dict[str, Column]:
    result: dict[str, list[Values]] = {}
    for index in range(len(rows)):
        row: Any = rows[index]
        if collator is not None:
            row = _collated_alone(collator, row, index, where)
        if not isinstance(row, Mapping):
            raise SpecError(where, f"row {index} is a {type(row).__name__}", "give dicts of the model's arguments")
        if index and {str(name) for name in row} != set(result):
            raise SpecError(where, f"row {index} holds {', '.join(map(str, row))}", "give every row the same names")
        for name, value in row.items():
            column = result.setdefault(str(name), [])
            column.append(_array(value, str(name), index, column, where))
    columns = {name: _column(name, values, where) for name, values in result.items()}
    if collator is None:
        return columns
    return _with_fills(columns, rows, collator, where)


def _array(value: Any, name: str, index: int, before: Sequence[Values], where: str) -> Values:
    try:
        array = np.asarray(value)
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, dtype=object)
    if array.size == 0 and array.dtype.kind == "f":  # numpy makes an empty list a float array
        array = array.astype(np.int64)
    if array.dtype.kind not in "buif":
        raise SpecError(where, f"{name} of row {index} is not a number or tensor", "leave it out, or tokenize it")
    if before and (array.ndim != before[0].ndim or array.shape[1:] != before[0].shape[1:]):
        why = f"{name} of row {index} has shape {array.shape}, but that of row 0 has {before[0].shape}"
        raise SpecError(where, why, "only the first size may differ: pad the others")
    return array


def _column(name: str, values: list[Values], where: str) -> Column:
    if len({value.shape for value in values}) == 1:
        made: Column = np.stack(values)
        if values[0].ndim and not len(values[0]):
            raise SpecError(where, f"{name} of row 0 is empty", "leave out rows without values")
        return made
    made = Ragged.of(values)
    check_rows(name, made, where)
    return made


def _collated_alone(collator: Collator, row: Any, index: int, where: str) -> dict[str, Values]:
    """Return the collator's result for a batch of one row, without the batch dimension."""
    made = _collated(collator, [row], f"row {index}", where)
    return {name: value[0] for name, value in made.items()}


def _collated(collator: Collator, rows: list[Any], what: str, where: str) -> dict[str, Values]:
    try:
        made = {str(name): np.asarray(value) for name, value in collator(rows).items()}
    except Exception as error:  # a user's collator may raise anything
        why = f"data_collator fails on {what}: {type(error).__name__}: {error}"
        raise SpecError(where, why, "correct it, or leave it out if rows hold only numbers") from error
    made = _with_positions(made, what, where)
    if "labels" in made and "decoder_input_ids" not in rows[0]:
        made.pop("decoder_input_ids", None)  # made of the labels; the model's task makes them again
    lengths = {name: 0 if value.ndim < 1 else len(value) for name, value in made.items()}
    for name, value in made.items():
        if lengths[name] != len(rows) and set(lengths.values()) != {1}:  # a collator may make one row of all
            if not value.ndim:
                why = f"data_collator gives {name}, one value for all rows"
                fix = f"leave it out, and pass {name} to the model in compute_loss of a subclass"
                raise SpecError(where, why, fix)
            why = f"data_collator gives {name} of shape {value.shape} for {len(rows)} rows"
            raise SpecError(where, why, "return tensors of one row per sample")
    return made


def _with_fills(columns: dict[str, Column], rows: Rows, collator: Collator, where: str) -> dict[str, Column]:
    """Add the collator's padding values to the ragged columns."""
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    made = dict(columns)
    for name, column in ragged.items():
        lengths = column.lengths()
        short, long = int(lengths.argmin()), int(lengths.argmax())
        together = _collated(collator, [rows[short], rows[long]], f"rows {short} and {long}", where)
        both = together.get(name, np.empty((2, 0)))
        own, longest = int(lengths[short]), int(lengths[long])
        if both.ndim > 1 and both.shape[:2] == (1, own + longest):  # it puts rows one after another, and pads none
            continue
        tail = both[0, own:] if both.ndim > 1 and both.shape[1] >= longest else np.empty(0)
        alone = column.values[column.offsets[short] : column.offsets[short + 1]]
        # A collator that draws random numbers changes the row each time; then only the tail can be checked.
        left = tail.size and np.array_equal(both[0, -own:], alone) and not np.array_equal(both[0, :own], alone)
        if not tail.size or left or (tail != tail.flat[0]).any():
            why = f"data_collator does not pad {name} of row {short} at its end with one value"
            raise SpecError(where, why, 'pad on the right (padding_side="right")')
        made[name] = Ragged(column.values, column.offsets, int(tail.flat[0]))
    return made


def _with_positions(batch: dict[str, Values], what: str, where: str) -> dict[str, Values]:
    """Say by positions where documents begin, which all kernels of attention read, and leave out ``BOUNDARIES``."""
    made = {name: value for name, value in batch.items() if name not in BOUNDARIES}
    ends = next(((name, batch[name]) for name in _ENDS if name in batch), None)
    if ends is not None:
        name, offsets = ends[0], ends[1].reshape(-1)
        begins = np.zeros((1, max(int(offsets[-1]), 1)), dtype=bool)
        begins[0, offsets[:-1]] = True
    elif "seq_idx" in made:
        name, numbers = "seq_idx", made["seq_idx"]
        begins = np.diff(numbers, prepend=numbers[:, :1] - 1, axis=1) != 0
    else:
        return made
    given = made.get(POSITIONS)
    if given is None:
        at = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
        made[POSITIONS] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    elif given.ndim == 2 and not np.array_equal(np.diff(given, prepend=given[:, :1], axis=1) != 1, begins):
        why = f"data_collator gives {what} documents by {name} that do not begin where {POSITIONS} restart"
        raise SpecError(where, why, f"let {POSITIONS} restart where a document begins, or leave them out")
    return made
