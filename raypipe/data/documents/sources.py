"""The files that ``data.path`` names, and how they divide into parts that can be read alone.

A part is a row group of a Parquet file, a record batch of an Arrow file, or a range of bytes of a JSONL or text file.
Only footers and headers are read, so that a terabyte takes seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.data.given_files import (
    BOM,
    COMPRESSIONS,
    SUFFIXES,
    UNREADABLE,
    Format,
    check_content,
    check_object,
    find_files,
    kind_of,
    open_text,
    unreadable,
)
from raypipe.errors import SpecError, nearest
from raypipe.files import expanded, parse_json

HUGGING_FACE, SPLITS = "state.json", "dataset_dict.json"
"""Files that ``Dataset.save_to_disk`` and ``DatasetDict.save_to_disk`` write."""
HELD_OUT_SPLITS = ("validation", "test")
FORMATS = "Parquet, JSONL or text files, or a folder that Dataset.save_to_disk wrote"
Content = Literal["text", "tokens"]
_TEXT = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


class FilePart(NamedTuple):
    """A part of a file that can be read alone."""

    file: str
    group: int
    """Number of the row group or record batch; 0 in files of bytes."""
    first: int
    """First row within the group, or first byte."""
    rows: int
    """Rows, or bytes."""
    size: int
    """Bytes of the column in memory, or nearly so."""


class DocumentFiles(NamedTuple):
    """Files of one format."""

    format: Format
    files: tuple[str, ...]
    is_tokens: bool
    """Whether the column holds token numbers instead of text."""

    def parts(self, column: str) -> Iterator[FilePart]:
        """Yield the parts of all files in order.

        Raises:
            SpecError: a file is damaged, lacks the column, or holds something else in it than the first one.
        """
        for file in self.files:
            yield from _PARTS[self.format](file, column, self.is_tokens)


def find_source(path: str, column: str, key: str) -> DocumentFiles:
    """Find the files that a path, folder or glob names; ``key`` is the job's key that names it.

    Raises:
        SpecError: there are none, they are of several formats, one looks like another format than its name says, or the
            first one with content lacks the column.
    """
    files = _files(path, key)
    kinds = {kind_of(file).format for file in files}
    if None in kinds:
        odd = next(file for file in files if kind_of(file).format is None)
        known = f"give files that end in {', '.join(SUFFIXES)}, and in {', '.join(COMPRESSIONS)} if compressed"
        raise SpecError(key, f"{odd} has no known format", known)
    if len(kinds) > 1:
        raise SpecError(key, f"{path} holds {' and '.join(sorted(map(str, kinds)))} files", "give files of one format")
    found = kinds.pop()
    assert found is not None
    for file in files:
        check_content(Path(file), key)
    return DocumentFiles(found, tuple(files), _is_tokens(files, found, column))


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
    found = [file.path for file in find_files(path)]
    if place.is_dir():
        found = [file for file in found if kind_of(file).format]
        data = [file for file in found if ".json" not in (suffix.lower() for suffix in file.suffixes)]
        found = data or found  # beside others, such as Parquet, a .json file describes them
    files = [str(one.resolve()) if kind_of(one.resolve()) == kind_of(one) else str(one) for one in found]
    files = [file for file in files if os.stat(file).st_size]
    if not files:
        raise SpecError(key, f'"{path}" names no files that hold documents', f"give {FORMATS}")
    return files


def _is_tokens(files: list[str], format: Format, column: str) -> bool:
    """Return whether the column holds token numbers, by the first file whose schema or first record says so."""
    if format == "text":
        return False
    for file in files:
        content = _first_record(file, column) if format == "jsonl" else _content(file, schema_of(file, format), column)
        if content is not None:
            return content == "tokens"
    raise SpecError("data.column", f"{column} holds no values in any file", "name a column of text or of token numbers")


def _first_record(file: str, column: str) -> Content | None:
    """Return what the first record of a file of JSON holds; None if there is no record."""
    try:
        with open_text(Path(file)) as lines:
            for number, line in enumerate(lines, 1):
                given = line.removeprefix(BOM) if number == 1 else line
                if not given.strip():
                    continue
                record = check_object(given)
                if column not in record:
                    raise _no_column(file, column, list(record))
                value = record[column]
                if value is None:
                    raise SpecError("data.path", f"{file}, line {number}: {column} is null", "leave such rows out")
                if isinstance(value, (str, list)):
                    return "text" if isinstance(value, str) else "tokens"
                raise _not_content(file, column, type(value).__name__)
    except ValueError as error:
        fix = "give an object a line"
        raise SpecError("data.path", f"{file}, line {number}: {error}", fix) from None
    except UNREADABLE as error:
        raise unreadable(file, error) from None
    return None


def _content(file: str, schema: pa.Schema, column: str) -> Content | None:
    """Return what the column of a table holds; None for a column of nulls, as a file without rows may have."""
    if schema.names.count(column) > 1:
        raise SpecError("data.column", f"{file} has several columns {column}", "give each a name of its own")
    if column not in schema.names:
        raise _no_column(file, column, schema.names)
    kind = schema.field(column).type
    content = content_of(kind)
    if content is None and not pa.types.is_null(inner_type(kind)):
        raise _not_content(file, column, str(kind))
    return content


def inner_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values of a type that is only another way of storing them."""
    while True:
        if pa.types.is_dictionary(kind) or str(kind).startswith("run_end_encoded"):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            return kind


def content_of(kind: pa.DataType) -> Content | None:
    """Return what a column of some type holds, however it is stored; None if neither text nor token numbers.

    >>> content_of(pa.dictionary(pa.int8(), pa.string_view())), content_of(pa.list_(pa.uint16(), 4))
    ('text', 'tokens')
    """
    kind = inner_type(kind)
    if str(kind) in _TEXT or pa.types.is_fixed_size_binary(kind):
        return "text"
    inner = getattr(kind, "value_type", None)
    return "tokens" if inner is not None and pa.types.is_integer(inner_type(inner)) else None


def _no_column(file: str, column: str, names: list[str]) -> SpecError:
    why = f'{file} has no "{column}" but {", ".join(names) or "nothing"}'
    return SpecError("data.column", why, nearest(column, names))


def _not_content(file: str, column: str, holds: str) -> SpecError:
    return SpecError("data.column", f"{column} of {file} holds {holds}", "name a column of text or of token numbers")


def schema_of(file: str, format: Format) -> pa.Schema:
    """Read the schema of a table.

    Raises:
        SpecError: it is damaged.
    """
    try:
        if format == "parquet":
            return pq.read_schema(file)
        with pa.memory_map(file) as content:
            return _opened(content).schema
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file, error) from None


def arrow_batches(content: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow stream or an Arrow file."""
    opened = _opened(content)
    if isinstance(opened, pa.RecordBatchFileReader):
        yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
    else:
        yield from opened


def _opened(content: pa.NativeFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    is_file = content.read(6) == b"ARROW1"
    content.seek(0)
    return pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)


def _check_as_first(file: str, schema: pa.Schema, column: str, is_tokens: bool) -> None:
    """Check that a file holds text or token numbers as the first one does."""
    content = _content(file, schema, column)
    if content is not None and (content == "tokens") != is_tokens:
        other = "token numbers" if is_tokens else "text"
        why = f"{column} of {file} holds {schema.field(column).type}, but the files before hold {other}"
        raise SpecError("data.column", why, "give files of one kind")


def _row_groups(file: str, column: str, is_tokens: bool) -> Iterator[FilePart]:
    try:
        about = pq.read_metadata(file)
        schema = about.schema.to_arrow_schema()
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file, error) from None
    _check_as_first(file, schema, column, is_tokens)
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        columns = (group.column(i) for i in range(group.num_columns))
        own = (one for one in columns if f"{one.path_in_schema}.".startswith(f"{column}."))
        yield FilePart(file, number, 0, group.num_rows, sum(one.total_uncompressed_size for one in own))


def _record_batches(file: str, column: str, is_tokens: bool) -> Iterator[FilePart]:
    _check_as_first(file, schema_of(file, "arrow"), column, is_tokens)
    try:
        with pa.memory_map(file) as content:
            for number, batch in enumerate(arrow_batches(content)):
                yield FilePart(file, number, 0, batch.num_rows, batch.column(column).nbytes)
    except (pa.ArrowInvalid, OSError) as error:
        raise unreadable(file, error) from None


def _bytes(file: str, _column: str, _is_tokens: bool) -> Iterator[FilePart]:
    size = os.path.getsize(file)
    # What is compressed can be read from its beginning alone: one part, which is not cut.
    yield FilePart(file, 0, 0, 1 if kind_of(file).compression else size, size)


_PARTS = {"parquet": _row_groups, "arrow": _record_batches, "jsonl": _bytes, "text": _bytes}


Block = tuple[FilePart, ...]


def blocks_of(parts: Iterable[FilePart], size: int) -> list[Block]:
    """Gather parts, in order, into blocks of about ``size`` bytes; larger parts are cut.

    No block is less than half of that, if there is that much, so that what does not fill a sample stays small.

    >>> one = FilePart("a", 0, 0, 10, 100)
    >>> [[(p.file, p.first, p.rows) for p in block] for block in blocks_of([one], 40)]
    [[('a', 0, 4)], [('a', 4, 3)], [('a', 7, 3)]]
    """
    made: list[Block] = []
    held: list[FilePart] = []
    for part in _cut(parts, size):
        held.append(part)
        if sum(one.size for one in held) >= size * 3 // 4:
            made.append(tuple(held))
            held = []
    if held and made and sum(one.size for one in held) < size // 2:
        made[-1] += tuple(held)
    elif held:
        made.append(tuple(held))
    return made


def _cut(parts: Iterable[FilePart], size: int) -> Iterator[FilePart]:
    for part in parts:
        pieces = min(max(1, math.ceil(part.size / size)), max(1, part.rows))
        if part.size <= size * 3 // 2:
            pieces = 1
        first, (least, rest) = part.first, divmod(part.rows, pieces)
        for number in range(pieces):
            count = least + (number < rest)
            if count:
                yield part._replace(first=first, rows=count, size=part.size * count // max(1, part.rows))
            first += count
