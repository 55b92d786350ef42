"""The files that ``data.path`` names, and how they divide into parts that can be read alone.

A part is a row group of a Parquet file, a record batch of an Arrow file, or a range of bytes of a JSONL or text file.
Only footers and headers are read, so that a terabyte takes seconds.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import SpecError, nearest
from raypipe.files import expanded, open_regular, parse_json

Format = Literal["parquet", "arrow", "jsonl", "text"]
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text",
    ".md": "text", ".py": "text",
}  # fmt: skip
HUGGING_FACE, SPLITS = "state.json", "dataset_dict.json"
"""Files that ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk`` write."""
HELD_OUT_SPLITS = ("validation", "test")
FORMATS = "Parquet, JSONL or text files, or a folder that Dataset.save_to_disk wrote"


class Part(NamedTuple):
    """What can be read alone."""

    file: str
    group: int
    """Number of the row group or record batch; 0 in files of bytes."""
    first: int
    """First row within the group, or first byte."""
    rows: int
    """Rows, or bytes."""
    size: int
    """Bytes of the column in memory, or nearly so."""


class Source(NamedTuple):
    """Files of one format."""

    format: Format
    files: tuple[str, ...]
    is_tokens: bool
    """Whether the column holds token numbers instead of text."""

    def parts(self, column: str) -> Iterator[Part]:
        """Yield the parts of all files in order.

        Raises:
            SpecError: a file is damaged, or lacks the column.
        """
        for file in self.files:
            yield from _PARTS[self.format](file, column)


def find_source(path: str, column: str, key: str) -> Source:
    """Find the files that a path, folder or glob names; ``key`` is the job's key that names it.

    Raises:
        SpecError: there are none, they are of several formats, or the first one lacks the column.
    """
    files = _files(path, key)
    kinds = {SUFFIXES.get(Path(file).suffix.lower()) for file in files}
    if None in kinds:
        odd = next(file for file in files if Path(file).suffix.lower() not in SUFFIXES)
        raise SpecError(key, f"{odd} has no known format", f"give files that end in {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise SpecError(key, f"{path} holds {' and '.join(sorted(map(str, kinds)))} files", "give files of one format")
    found = kinds.pop()
    assert found is not None
    return Source(found, tuple(files), _is_tokens(files[0], found, column))


def split_of(path: str) -> tuple[str, str | None]:
    """Return the training and the held-out part of a folder that ``DatasetDict.save_to_disk`` wrote.

    Any other path is the training part itself.

    Raises:
        SpecError: the folder has no split for training.
    """
    folder = expanded(Path(path))
    if not (folder / SPLITS).is_file():
        return path, None
    splits = parse_json((folder / SPLITS).read_bytes())["splits"]
    if "train" not in splits:
        raise SpecError("data.path", f"{path} has no split train but {', '.join(splits)}", "name the folder of one")
    held_out = next((str(folder / name) for name in HELD_OUT_SPLITS if name in splits), None)
    return str(folder / "train"), held_out


def _files(path: str, key: str) -> list[str]:
    place = expanded(Path(path))
    if place.is_dir() and (place / HUGGING_FACE).is_file():
        named = parse_json((place / HUGGING_FACE).read_bytes())["_data_files"]
        return [str((place / one["filename"]).resolve()) for one in named]
    if place.is_dir():
        found = [one for one in sorted(place.rglob("*")) if one.is_file() and not one.name.startswith(".")]
        found = [one for one in found if one.suffix.lower() in SUFFIXES]
    elif place.is_file():
        found = [place]
    else:
        found = [Path(one) for one in sorted(glob.glob(str(place), recursive=True)) if os.path.isfile(one)]
    files = [str(one.resolve()) for one in found if one.stat().st_size]
    if not files:
        raise SpecError(key, f'"{path}" names no files that hold documents', f"give {FORMATS}")
    return files


def _is_tokens(file: str, format: Format, column: str) -> bool:
    """Return whether the column holds token numbers, by the first file's schema or first record."""
    if format == "text":
        return False
    if format == "jsonl":
        with open_regular(Path(file)) as lines:
            try:
                first = parse_json(lines.readline())
                value, names = first.get(column), list(first)
            except (ValueError, AttributeError):
                raise SpecError("data.path", f"{file}, line 1: not a JSON object", "give an object a line") from None
        kind = type(value).__name__
        is_text, is_tokens = isinstance(value, str), isinstance(value, list)
    else:
        schema = _schema(file, format)
        names = schema.names
        found = schema.field(column).type if column in names else None
        kind = str(found)
        is_text = found is not None and (pa.types.is_string(found) or pa.types.is_large_string(found))
        is_tokens = found is not None and (pa.types.is_list(found) or pa.types.is_large_list(found))
        is_tokens = found is not None and is_tokens and pa.types.is_integer(found.value_type)
    if column not in names:
        raise SpecError("data.column", f'{file} has no "{column}" but {", ".join(names)}', nearest(column, names))
    if not is_text and not is_tokens:
        raise SpecError("data.column", f"{column} of {file} holds {kind}", "name a column of text or of token numbers")
    return is_tokens


def _schema(file: str, format: Format) -> pa.Schema:
    try:
        if format == "parquet":
            return pq.read_schema(file)
        with pa.memory_map(file) as content, pa.ipc.open_stream(content) as stream:
            return stream.schema
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(file, error) from None


def damaged(file: str, error: BaseException) -> SpecError:
    """Make the error about a file that cannot be read."""
    return SpecError("data.path", f"can't read {file}: {str(error).splitlines()[0]}", "mend it, or leave it out")


def _row_groups(file: str, column: str) -> Iterator[Part]:
    try:
        about = pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(file, error) from None
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        own = [one for one in columns if one.path_in_schema.split(".")[0] == column]
        if not own:
            raise SpecError("data.column", f'{file} has no "{column}"', "give files with the same columns")
        yield Part(file, number, 0, group.num_rows, own[0].total_uncompressed_size)


def _record_batches(file: str, column: str) -> Iterator[Part]:
    try:
        with pa.memory_map(file) as content, pa.ipc.open_stream(content) as stream:
            for number, batch in enumerate(stream):
                yield Part(file, number, 0, batch.num_rows, batch.column(column).nbytes)
    except KeyError:
        raise SpecError("data.column", f'{file} has no "{column}"', "give files with the same columns") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(file, error) from None


def _bytes(file: str, _column: str) -> Iterator[Part]:
    size = os.path.getsize(file)
    yield Part(file, 0, 0, size, size)


_PARTS = {"parquet": _row_groups, "arrow": _record_batches, "jsonl": _bytes, "text": _bytes}
