"""Named arrays, one row per sample: checked, split and laid out so that any device can map any rows.

Rows are visited like windows of text: epoch after epoch, each in an order that follows from (seed, epoch) alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raypipe.data.atomic import digest, replace_file
from raypipe.data.corpus import SPLITS, Split, order_key
from raypipe.data.order import permuted
from raypipe.errors import SpecError
from raypipe.job import DataSpec
from raypipe.models.task import Field

META = "arrays.json"
HELD_OUT = 10
"""Without a file of their own, one of so many samples is held out."""
Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Arrays:
    """The fields of each split, memory-mapped."""

    columns: dict[Split, dict[str, npt.NDArray[Any]]]

    @staticmethod
    def open(directory: Path) -> Arrays:
        """Map what ``prepare_arrays`` wrote; raises SpecError if there is none."""
        try:
            meta = json.loads((directory / META).read_text())
            return Arrays(
                {
                    split: {
                        name: np.asarray(np.load(directory / f"{split}.{name}.npy", mmap_mode="r"))
                        for name in meta["fields"]
                    }
                    for split in SPLITS
                }
            )
        except (OSError, ValueError, KeyError) as error:
            raise SpecError(str(directory), f"holds no arrays: {error}", "prepare the data again") from None

    def rows(self, split: Split) -> int:
        """Samples of one epoch."""
        return len(next(iter(self.columns[split].values())))

    def batch(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """A step's mini-batch; integers as int64. Held-out samples don't depend on the seed."""
        size = self.rows(split)
        places = []
        for sample in range(step * batch, (step + 1) * batch):
            epoch, position = divmod(sample, size)
            places.append(permuted(order_key(split, seed if split == "train" else 0, epoch), size, position))
        return {name: _tensor(column[places]) for name, column in self.columns[split].items()}


def prepare_arrays(data: DataSpec, directory: Path) -> Arrays:
    """Read the job's file (or files), split it, and write a ``.npy`` per split and field into ``directory``.

    Raises SpecError where a file is missing or no arrays, rows don't match, or a field can't be a model's input.
    """
    train = read_columns(data.path, "data.path")
    if data.held_out is not None:
        held_out = read_columns(data.held_out, "data.held_out")
        if {n: (a.shape[1:], a.dtype) for n, a in train.items()} != {
            n: (a.shape[1:], a.dtype) for n, a in held_out.items()
        }:
            raise SpecError("data.held_out", "has other fields than data.path", "give both the same names and shapes")
        return write_arrays({"train": train, "val": held_out}, directory, data.path)
    return write_arrays(_split(train), directory, data.path)


def _split(columns: Columns) -> dict[Split, Columns]:
    """A tenth of the rows, taken from all over, is held out; which ones follows from their number alone."""
    size = len(next(iter(columns.values())))
    if size < 2:
        raise SpecError("data.path", f"holds {size} sample, one has to be held out", "give more samples")
    places = np.array([permuted(order_key("val", 0, -1), size, i) for i in range(size)])
    cut = max(1, size // HELD_OUT)
    chosen: dict[Split, npt.NDArray[np.int64]] = {"train": np.sort(places[cut:]), "val": np.sort(places[:cut])}
    return {split: {name: column[rows] for name, column in columns.items()} for split, rows in chosen.items()}


def write_arrays(splits: Mapping[Split, Columns], directory: Path, source: str) -> Arrays:
    """Write checked columns where devices find them; ``arrays.json`` last, so a reader never sees half of them."""
    directory.mkdir(parents=True, exist_ok=True)
    digests = {}
    for split in SPLITS:
        for name, column in splits[split].items():
            path = directory / f"{split}.{name}.npy"
            partial = path.with_suffix(".partial")
            with partial.open("wb") as out:
                np.save(out, column, allow_pickle=False)
            partial.replace(path)
            digests[path.name] = digest(path)
    meta = {
        "source": source,
        "samples": {split: len(next(iter(splits[split].values()))) for split in SPLITS},
        "fields": {
            name: {"shape": list(field.shape), "dtype": str(field.dtype).removeprefix("torch.")}
            for name, field in ((name, _field(column)) for name, column in splits["train"].items())
        },
        "sha256": digests,
    }
    replace_file(directory / META, json.dumps(meta, indent=1).encode())
    return Arrays.open(directory)


def read_columns(source: str, key: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an ``.npz`` or ``.safetensors`` file; ``key`` is the job's key that names it.

    Raises SpecError: no such file, no arrays, names that no model's argument can have, rows that don't match.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise SpecError(key, f'"{source}" is no file', "give an .npz or .safetensors file of arrays")
    try:
        columns = _safetensors(path) if path.suffix == ".safetensors" else _npz(path)
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise _no_arrays(source, key, error) from None
    check_columns(columns, key)
    return columns


def _no_arrays(source: str, key: str, error: Exception) -> SpecError:
    return SpecError(key, f"{source} holds no arrays: {error}", "give an .npz or .safetensors file of named arrays")


def check_columns(columns: Columns, key: str) -> None:
    """Raise SpecError unless these can be the fields of samples."""
    if not columns:
        raise SpecError(key, "holds no arrays", "give at least a model input and labels")
    rows = {name: column.shape[0] if column.ndim else None for name, column in columns.items()}
    if len(set(rows.values())) > 1 or None in rows.values():
        said = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise SpecError(key, f"the arrays differ in rows: {said}", "give every array one row per sample")
    for name, column in columns.items():
        if not name.isidentifier():
            raise SpecError(key, f'"{name}" cannot be the name of a model\'s argument', "name arrays like arguments")
        if column.dtype.kind not in "buif":
            raise SpecError(key, f"{name} holds {column.dtype}", "give numbers or booleans")


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
    # numpy knows no bfloat16.
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}


def _tensor(rows: npt.NDArray[Any]) -> Tensor:
    kind = rows.dtype.kind
    if kind in "ui":
        return torch.from_numpy(rows.astype(np.int64))
    return torch.from_numpy(rows if kind == "b" else rows.astype(np.float32 if rows.itemsize < 4 else rows.dtype))


def declared_fields(data: DataSpec) -> dict[str, Field] | None:
    """What the job's arrays are as raw inputs, from the head of the file alone; None for text.

    Raises SpecError as ``read_columns`` does, where the file is none.
    """
    if data.type != "arrays":
        return None
    path = Path(data.path).expanduser()
    if path.suffix != ".npz" or not path.is_file():
        return {name: _field(column) for name, column in read_columns(data.path, "data.path").items()}
    try:
        with np.load(path, allow_pickle=False) as archive:
            heads = {name: _head(archive, name) for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise _no_arrays(data.path, "data.path", error) from None
    check_columns(heads, "data.path")
    return {name: _field(column) for name, column in heads.items()}


def _head(archive: Any, name: str) -> npt.NDArray[Any]:
    """No row of one array of an archive: its shape and dtype, without reading it."""
    with archive.zip.open(f"{name}.npy") as content:
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(content)
    return np.empty((0, *shape[1:]), dtype=dtype)


def known_fields(directory: Path) -> dict[str, Field] | None:
    """The fields that were prepared in a directory; None where there are no arrays."""
    try:
        fields = json.loads((directory / META).read_text())["fields"]
    except FileNotFoundError:
        return None
    return {name: Field(tuple(about["shape"]), getattr(torch, about["dtype"])) for name, about in fields.items()}


def _field(column: npt.NDArray[Any]) -> Field:
    none = _tensor(column[:0])
    return Field(tuple(none.shape[1:]), none.dtype)
