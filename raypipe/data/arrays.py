"""Named arrays with one row per sample: checked, split, and stored so that any device can memory-map any rows.

Rows are visited like windows of text: epoch after epoch, each in an order that depends only on (seed, epoch). Rows may
differ in length (``ragged``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.ragged import (
    FILL,
    OFFSETS,
    TOKENS,
    Column,
    Ragged,
    Values,
    check_beside,
    check_rows,
    classes,
    fill_of,
    fitted,
    flat,
    is_packed,
    joined,
    of_one_form,
)
from raypipe.data.sample_order import (
    ORDER,
    SPLITS,
    GroupedByLength,
    Split,
    order_key,
    permuted,
    read_order,
    write_order,
)
from raypipe.errors import SpecError
from raypipe.files import expanded, read_json, sha256, whole, write_whole
from raypipe.job import DataSpec
from raypipe.models.task import MASK, POSITIONS, Field, FirstRows

META = "arrays.json"
AGAIN = "prepare the data again: remove the folder, then --resume does"
HELD_OUT = 10
"""Without a file of held-out samples, one of this many samples is held out."""
Columns = Mapping[str, Column]


@dataclass(frozen=True)
class Arrays:
    """The columns of each split, memory-mapped."""

    columns: dict[Split, dict[str, Column]]
    grouped: bool = False
    """Whether training takes rows of similar lengths together (``data.group_by_length``)."""
    order: npt.NDArray[np.int64] | None = None
    """Row numbers of each training step, ``[steps, batch]``, below 0 for none (``data.order``); None to shuffle."""

    @staticmethod
    def open(directory: Path, meta: str = META) -> Arrays:
        """Map the files that ``write_arrays`` wrote.

        Raises:
            SpecError: they are missing or damaged.
        """
        try:
            about = read_json(directory / meta)
            fills = about["fills"]

            def mapped(split: Split, name: str) -> Values:
                return np.asarray(np.load(directory / f"{split}.{name}.npy", mmap_mode="r"))

            def column(split: Split, name: str) -> Column:
                if name not in fills:
                    return mapped(split, name)
                return Ragged(mapped(split, name), mapped(split, f"{name}{OFFSETS}"), fills[name])

            columns = {split: {name: column(split, name) for name in about["columns"]} for split in SPLITS}
            order = np.load(directory / ORDER, mmap_mode="r") if about.get("order", False) else None
            return Arrays(columns, bool(about.get("group_by_length", False)), order)
        except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
            raise SpecError(str(directory), f"holds no arrays: {error}", AGAIN) from None

    def rows(self, split: Split) -> int:
        """Return the number of samples of one epoch."""
        return len(next(iter(self.columns[split].values())))

    def repeats(self, split: Split, step: int, batch: int) -> Tensor | None:
        """Return which samples of a mini-batch do not count, bool ``[batch]``; None if all do.

        Those are samples of a validation that an earlier mini-batch had, unless it has no others (the validation goes
        through the rows again then), and those of a training step that ``data.order`` does not fill.
        """
        if split == "train" and self.order is not None:
            unfilled = torch.from_numpy(self._ordered(step, batch) < 0)
            return unfilled if bool(unfilled.any()) else None
        left = self.rows(split) - step * batch
        return torch.arange(batch) >= left if split == "val" and 0 < left < batch else None

    def places(self, split: Split, seed: int, step: int, batch: int) -> list[int]:
        """Return the row numbers of a step's mini-batch; held-out rows do not depend on the seed."""
        if split == "train" and self.order is not None:
            rows = self._ordered(step, batch)
            result: list[int] = np.where(rows < 0, rows[0], rows).tolist()  # of no row's place, only the shape is read
            return result
        size = self.rows(split)
        lengths = self._lengths if split == "train" else None
        result = []
        for sample in range(step * batch, (step + 1) * batch):
            epoch, position = divmod(sample, size)
            key = order_key(split, seed if split == "train" else 0, epoch)
            if lengths is None:
                result.append(permuted(key, size, position))
            else:
                result.append(lengths.place(key, position, batch))
        return result

    def _ordered(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        """Return the row numbers of a training step, below 0 for none; steps beyond the order begin it again.

        Mini-batches of another size, as a profile has, take the same rows one after another.
        """
        assert self.order is not None, "only where the rows have an order"
        steps, each = self.order.shape
        if batch == each:
            return np.asarray(self.order[step % steps])
        rows = self.order[self.order >= 0]
        return np.asarray(rows[np.arange(step * batch, (step + 1) * batch) % len(rows)])

    @cached_property
    def _lengths(self) -> GroupedByLength | None:
        """Return what orders the training rows by length; None if nothing does."""
        ragged = {name: c for name, c in self.columns["train"].items() if isinstance(c, Ragged)}
        if not self.grouped or not ragged:
            return None
        return GroupedByLength(ragged.get(TOKENS, next(iter(ragged.values()))).lengths())

    @cached_property
    def longest(self) -> dict[str, int]:
        """Length of the longest row in any split, per ragged column."""
        result: dict[str, int] = {}
        for columns in self.columns.values():
            for name, column in columns.items():
                if isinstance(column, Ragged):
                    result[name] = max(result.get(name, 0), column.longest())
        return result

    def lengths(
        self, split: Split, seed: int, step: int, batch: int, multiple: int = 1
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return, per ragged column, the padded length of each sample of a mini-batch alone."""
        ragged = {name: c for name, c in self.columns[split].items() if isinstance(c, Ragged)}
        if not ragged:
            return {}
        at = self.places(split, seed, step, batch)
        result = {name: classes(c.lengths_at(at), multiple, self.longest[name]) for name, c in ragged.items()}
        return result | ({MASK: result[TOKENS]} if _masked(self.columns[split]) else {})

    def batch(
        self,
        split: Split,
        seed: int,
        step: int,
        batch: int,
        multiple: int = 1,
        padding: int = 0,
        skipped: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Return a step's mini-batch without the columns ``skipped``; integers are int64.

        Ragged columns are padded, tokens with ``padding``, and a mask is added if the data has none.
        """
        at = self.places(split, seed, step, batch)
        lengths = self.lengths(split, seed, step, batch, multiple)
        made = {}
        for name, column in self.columns[split].items():
            if name in skipped:
                continue
            if isinstance(column, Ragged):
                fill = fill_of(name, padding) if column.fill is None else column.fill
                made[name] = _tensor(column.padded(at, int(lengths[name].max()), fill))
            else:
                made[name] = _tensor(column[at])
        if MASK in lengths and MASK not in made:
            made[MASK] = mask_of(self.columns[split][TOKENS], at, int(lengths[MASK].max()))
        return made

    def measures(self) -> frozenset[str]:
        """Return the names of the floating-point columns with equally long rows."""
        columns = self.columns["train"].items()
        return frozenset(n for n, c in columns if not isinstance(c, Ragged) and c.dtype.kind == "f")


def _masked(columns: Columns) -> bool:
    """Return whether a mask must be made, because tokens are ragged and the data has no mask."""
    return isinstance(columns.get(TOKENS), Ragged) and MASK not in columns


def mask_of(column: Column, at: Sequence[int], length: int) -> Tensor:
    """Return int64 ``[rows, length]``: 1 for a row's own values, 0 for padding."""
    assert isinstance(column, Ragged)
    own = torch.from_numpy(column.lengths_at(at))
    return (torch.arange(length) < own.unsqueeze(1)).long()


def prepare_arrays(data: DataSpec, directory: Path, per_token: bool = False, longest: int | None = None) -> Arrays:
    """Read the job's file or files, split the rows, and write a ``.npy`` per split and column into ``directory``.

    ``per_token`` says whether every token has a label. Rows of more than ``longest`` tokens become what
    ``data.long_documents`` says.

    Raises:
        SpecError: a file is missing or holds no arrays, rows do not match or are too long, or a column cannot be a
            model's input.
    """
    train = read_columns(data.path, "data.path")
    order = None if data.order is None else read_order(data.order, len(next(iter(train.values()))))
    if order is not None and data.held_out is None:
        why = "numbers the rows of data.path, of which some would be held out"
        raise SpecError("data.order", why, "give data.held_out, a file of its own")
    check_beside(train, per_token, "data.path")
    grouped = data.group_by_length
    if data.held_out is not None:
        train, held_out = of_one_form(train, read_columns(data.held_out, "data.held_out"))
        check_beside(held_out, per_token, "data.held_out")
        if {n: _form(c) for n, c in train.items()} != {n: _form(c) for n, c in held_out.items()}:
            raise SpecError("data.held_out", "has other fields than data.path", "give both the same names and shapes")
        splits: dict[Split, Columns] = {"train": train, "val": held_out}
    else:
        splits = split_rows(train)
    if longest is not None:
        splits = {
            split: fitted(columns, longest, data.long_documents, "data.path" if split == "train" else "data.held_out")
            for split, columns in splits.items()
        }
    return write_arrays(splits, directory, data.path, grouped=grouped, order=order)


def _form(column: Column) -> object:
    """Return the properties in which two files must agree."""
    if isinstance(column, Ragged):
        return "ragged", column.values.shape[1:], column.values.dtype, column.fill
    return column.shape[1:], column.dtype


def split_rows(columns: Columns) -> dict[Split, Columns]:
    """Hold out a tenth of the rows, chosen pseudo-randomly by the number of rows alone."""
    size = len(next(iter(columns.values())))
    if size < 2:
        raise SpecError("data.path", f"holds {size} sample, but one must be held out", "give more samples")
    places = np.array([permuted(order_key("val", 0, -1), size, i) for i in range(size)])
    cut = max(1, size // HELD_OUT)
    chosen: dict[Split, npt.NDArray[np.int64]] = {"train": np.sort(places[cut:]), "val": np.sort(places[:cut])}
    return {
        split: {name: c.taken(rows) if isinstance(c, Ragged) else c[rows] for name, c in columns.items()}
        for split, rows in chosen.items()
    }


def write_arrays(
    splits: Mapping[Split, Columns],
    directory: Path,
    source: str,
    meta: str = META,
    grouped: bool = False,
    order: npt.NDArray[np.int64] | None = None,
) -> Arrays:
    """Write checked columns for devices to read; ``meta`` is written last, so a reader never sees incomplete data."""
    directory.mkdir(parents=True, exist_ok=True)
    digests = {}
    for split in SPLITS:
        for name, values in flat(splits[split]).items():
            if name.endswith(FILL):
                continue
            path = directory / f"{split}.{name}.npy"
            with whole(path) as partial, partial.open("wb") as out:
                np.save(out, values, allow_pickle=False)
            digests[path.name] = sha256(path)
    if order is not None:
        write_order(order, directory)
    train = splits["train"]
    about = {
        "source": source,
        "group_by_length": grouped,
        "order": order is not None,
        "samples": {split: len(next(iter(splits[split].values()))) for split in SPLITS},
        "columns": list(train),
        "fills": {name: column.fill for name, column in train.items() if isinstance(column, Ragged)},
        "mean_lengths": {n: float(c.lengths().mean()) for n, c in train.items() if isinstance(c, Ragged)},
        "fields": {
            name: {"shape": list(field.shape), "dtype": str(field.dtype).removeprefix("torch."), "packed": field.packed}
            for name, field in _fields(*splits.values()).items()
        },
        "sha256": digests,
    }
    write_whole(directory / meta, json.dumps(about, indent=1).encode(), synced=True)
    return Arrays.open(directory, meta)


def read_columns(source: str, key: str) -> dict[str, Column]:
    """Read all arrays of an ``.npz`` or ``.safetensors`` file; ``key`` is the job's key that names it.

    Raises:
        SpecError: there is no such file, it holds no arrays, a name cannot be a model's argument, or rows do not match.
    """
    path = expanded(Path(source))
    if not path.is_file():
        raise SpecError(key, f'"{source}" is not a file', "give an .npz or .safetensors file of arrays")
    try:
        arrays = _safetensors(path) if path.suffix == ".safetensors" else _npz(path)
    except Exception as error:  # numpy and zipfile may raise anything for a damaged file, even a MemoryError
        raise _no_arrays(source, key, error) from None
    columns = joined(arrays, key)
    check_columns(columns, key)
    return columns


def _no_arrays(source: str, key: str, error: Exception) -> SpecError:
    why = str(error) or type(error).__name__
    return SpecError(key, f"{source} holds no arrays: {why}", "give an .npz or .safetensors file of named arrays")


def check_columns(columns: Columns, key: str) -> None:
    """Check that columns can be the fields of samples.

    Raises:
        SpecError: there are none, they differ in rows, a name cannot be an argument, or values are not numbers.
    """
    if not columns:
        raise SpecError(key, "holds no arrays", "give at least a model input and labels")
    rows = {name: len(c) if isinstance(c, Ragged) or c.ndim else None for name, c in columns.items()}
    if len(set(rows.values())) > 1 or None in rows.values():
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise SpecError(key, f"the arrays differ in rows: {counts}", "give every array one row per sample")
    if 0 in rows.values():
        raise SpecError(key, "the arrays have no rows", "give every array one row per sample")
    for name, column in columns.items():
        if not name.isidentifier():
            raise SpecError(key, f'"{name}" cannot be the name of a model\'s argument', "name arrays like arguments")
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype.kind not in "buif":
            raise SpecError(key, f"{name} holds {values.dtype}", "give numbers or booleans")
        check_rows(name, column, key)


def _npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    archive = np.load(path, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("a single array has no name")
    with archive:
        return {name: archive[name] for name in archive.files}


def _safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as archive:
            tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118, no mapping
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    # numpy has no bfloat16.
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}


def _tensor(rows: npt.NDArray[Any]) -> Tensor:
    kind = rows.dtype.kind
    if kind in "ui":
        return torch.from_numpy(rows.astype(np.int64, copy=False))
    kept = kind == "b" or rows.itemsize >= 4
    return torch.from_numpy(rows if kept else rows.astype(np.float32))


def declared_fields(data: DataSpec) -> dict[str, Field] | None:
    """Return the fields of the job's arrays, reading only the headers of the files; None for text.

    The length of a ragged column is that of its longest row, held-out rows included.

    Raises:
        SpecError: as ``read_columns``.
    """
    if data.type != "arrays":
        return None
    train = _heads(data.path, "data.path")
    parts = (train,) if data.held_out is None else of_one_form(train, _heads(data.held_out, "data.held_out"))
    fields = _fields(*parts)
    for name, column in parts[0].items():
        if not isinstance(column, Ragged):
            fields[name] = fields[name]._replace(rows=FirstRows(partial(_first_of_file, data.path, name)))
    return fields


def _first_of_file(source: str, name: str, rows: int) -> Tensor:
    """Return the first rows of a column of equally long rows."""
    path = expanded(Path(source))
    if path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as archive, archive.zip.open(f"{name}.npy") as content:
            shape, fortran, dtype = _header(content)
            if not fortran:
                rows = min(rows, shape[0])
                values = np.frombuffer(content.read(rows * dtype.itemsize * math.prod(shape[1:])), dtype)
                return _tensor(values.reshape(rows, *shape[1:]).copy())
    column = read_columns(source, "data.path")[name]
    assert not isinstance(column, Ragged)
    return _tensor(column[:rows].copy())


def _first_of_folder(path: Path, rows: int) -> Tensor:
    return _tensor(np.load(path, mmap_mode="r")[:rows].copy())


def _heads(source: str, key: str) -> dict[str, Column]:
    """Read the columns of a file without their values, where its format allows that and no value says what they are."""
    path = expanded(Path(source))
    if path.suffix != ".npz" or not path.is_file():
        return read_columns(source, key)
    try:
        with np.load(path, allow_pickle=False) as archive:
            read = {MASK, POSITIONS} if POSITIONS in archive.files else set()
            arrays = {
                n: archive[n] if n.endswith((OFFSETS, FILL)) or n in read else _head(archive, n) for n in archive.files
            }
    except Exception as error:  # as in read_columns
        raise _no_arrays(source, key, error) from None
    heads = joined(arrays, key)
    check_columns(heads, key)
    return heads


def _head(archive: Any, name: str) -> Values:
    """Return zeros that take no memory, with the shape and dtype of an array in an archive."""
    with archive.zip.open(f"{name}.npy") as content:
        shape, _, dtype = _header(content)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _header(content: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read shape, whether it is in Fortran's order, and dtype from the beginning of a ``.npy`` file."""
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(content)


def known_fields(directory: Path) -> dict[str, Field] | None:
    """Read the fields that were prepared in a directory; None if there are no arrays.

    Raises:
        SpecError: the file that describes them is damaged.
    """
    try:
        meta = read_json(directory / META)
        return {
            name: Field(
                tuple(about["shape"]),
                getattr(torch, about["dtype"]),
                FirstRows(partial(_first_of_folder, directory / f"train.{name}.npy"))
                if name in meta["columns"] and name not in meta["fills"]
                else None,
                bool(about.get("packed", False)),
            )
            for name, about in meta["fields"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SpecError(str(directory / META), "is damaged", AGAIN) from None


def mean_tokens(directory: Path, name: str = TOKENS, meta: str = META) -> float | None:
    """Return the mean number of tokens of a training sample, without padding; None if all are equally long."""
    try:
        result: dict[str, float] = read_json(directory / meta).get("mean_lengths", {})
    except FileNotFoundError:
        return None
    return result.get(name)


def _fields(*parts: Columns) -> dict[str, Field]:
    """Return the columns' fields: shape and dtype for one sample, the longest one of a ragged column."""
    made = {}
    for name, column in parts[0].items():
        values = column.values if isinstance(column, Ragged) else column
        none = _tensor(np.empty((0, *values.shape[1:]), values.dtype))
        own = [c.longest() for part in parts if isinstance(c := part.get(name), Ragged)]
        made[name] = Field((*([max(own)] if own else ()), *none.shape[1:]), none.dtype)
    if _masked(parts[0]):
        made[MASK] = Field(made[TOKENS].shape[:1], torch.int64)
    if is_packed(*parts):
        made[POSITIONS] = made[POSITIONS]._replace(packed=True)
    return made
