"""Turn a Python dataset of dicts into columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from raypipe.data.ragged import Column, Ragged, Values, check_rows
from raypipe.errors import SpecError
from raypipe.models.task import POSITIONS


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
    found: dict[str, list[Values]] = {}
    for index in range(len(rows)):
        row: Any = rows[index]
        if collator is not None:
            row = _collated_alone(collator, row, index, where)
        if not isinstance(row, Mapping):
            raise SpecError(where, f"row {index} is a {type(row).__name__}", "give dicts of the model's arguments")
        if index and {str(name) for name in row} != set(found):
            raise SpecError(where, f"row {index} holds {', '.join(map(str, row))}", "give every row the same names")
        for name, value in row.items():
            column = found.setdefault(str(name), [])
            column.append(_array(value, str(name), index, column, where))
    columns = {name: _column(name, values, where) for name, values in found.items()}
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
