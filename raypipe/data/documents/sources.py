"""The files that ``data.path`` names, and how they divide into parts that can be read alone.

A part is a row group of a Parquet file, a record batch of an Arrow file, or a range of bytes of a JSONL or text file.
Only footers and headers are read, so that a terabyte takes seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.json
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
    result = kinds.pop()
    assert result is not None
    for file in files:
        check_content(Path(file), key)
    return DocumentFiles(result, tuple(files), _is_tokens(files, result, column))


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
    result = [file.path for file in find_files(path)]
    if place.is_dir():
        result = [file for file in result if kind_of(file).format]
        data = [file for file in result if ".json" not in (suffix.lower() for suffix in file.suffixes)]
        result = data or result  # beside others, such as Parquet, a .json file describes them
    files = [str(one.resolve()) if kind_of(one.resolve()) == kind_of(one) else str(one) for one in result]
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


# Read the documents of a block.


TEXT_BYTES = 64 << 10
"""Text files are cut at line ends into documents of about this size."""
JSON_BYTES = 4 << 20
"""Bytes of records that are parsed at once."""
ROWS = 1024
"""Rows that are decoded at once."""


class Document(NamedTuple):
    """A row of the data."""

    content: str | list[int]
    """Text, or token numbers."""
    ends: bool
    """Whether it ends here; a text file's documents go on until the last one."""


def documents_of(block: Block, format: Format, column: str, is_tokens: bool) -> Iterator[Document]:
    """Yield the documents of a block in the order of its files.

    Raises:
        SpecError: a file is damaged, changed since the run began, or has a row without content.
    """
    for part in block:
        try:
            if format == "text":
                yield from _text(part)
            elif format == "jsonl":
                for lines in _chunks(part):
                    yield from (Document(value, True) for value in _records(part, lines, column, is_tokens))
            else:
                row = part.first
                for values in (_parquet if format == "parquet" else _arrow)(part, column):
                    for number, value in enumerate(values.to_pylist(), row):
                        yield Document(_checked(value, part, number, column), True)
                    row += len(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, *UNREADABLE) as error:
            raise unreadable(part.file, error) from None


def _checked(value: Any, part: FilePart, row: int, column: str) -> str | list[int]:
    """Return the content of a row of a table."""
    where = f"{part.file}: row {row} of group {part.group}"
    if value is None:
        raise SpecError("data.path", f'{where} has no "{column}"', "leave such rows out")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise unreadable(where, error, "save it as UTF-8, or leave it out") from None
    if isinstance(value, list) and None in value:
        raise SpecError("data.path", f"{where} has a null among its numbers", "leave such rows out")
    return value  # type: ignore[no-any-return]


def _parquet(part: FilePart, column: str) -> Iterator[pa.Array]:
    with pq.ParquetFile(part.file, memory_map=True) as file:
        skip, left = part.first, part.rows
        for batch in file.iter_batches(ROWS, row_groups=[part.group], columns=[column], use_threads=False):
            values = batch.column(column)[skip : skip + left]
            skip = max(0, skip - batch.num_rows)
            left -= len(values)
            if len(values):
                yield values
            if not left:
                return
    raise _changed(part)


def _arrow(part: FilePart, column: str) -> Iterator[pa.Array]:
    with pa.memory_map(part.file) as content:
        for number, batch in enumerate(arrow_batches(content)):
            if number == part.group:
                yield batch.column(column)[part.first : part.first + part.rows]
                return
    raise _changed(part)


def _lines(part: FilePart) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines that begin within a range of bytes, or all of a compressed file, and whether each is the last."""
    compressed = kind_of(part.file).compression is not None
    with open_text(Path(part.file)) as file:
        end = part.first + part.rows
        if part.first:
            file.seek(part.first - 1)
            file.readline()
        at_start = not part.first
        while (compressed or file.tell() < end) and (line := file.readline()):
            yield line.removeprefix(BOM) if at_start else line, not file.peek(1)  # type: ignore[attr-defined]
            at_start = False


def _chunks(part: FilePart) -> Iterator[list[tuple[int, bytes]]]:
    """Yield lines that are not blank, each with its number within the part, some ``JSON_BYTES`` at a time."""
    held: list[tuple[int, bytes]] = []
    size = 0
    for number, (line, _) in enumerate(_lines(part)):
        if line.strip():
            held.append((number, line))
            size += len(line)
        if size >= JSON_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _records(part: FilePart, lines: list[tuple[int, bytes]], column: str, is_tokens: bool) -> list[str | list[int]]:
    """Return the contents of some records."""
    content = b"".join(line if line.endswith(b"\n") else line + b"\n" for _, line in lines)
    kind = pa.list_(pa.int64()) if is_tokens else pa.string()
    options = pyarrow.json.ParseOptions(pa.schema([(column, kind)]), unexpected_field_behavior="ignore")
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    try:
        table = pyarrow.json.read_json(pa.BufferReader(content), reading, options)
        values: list[Any] = table.column(column).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _bad_record(part, lines, column, is_tokens) or unreadable(part.file, error) from None
    if len(values) != len(lines) or None in values or (is_tokens and any(None in value for value in values)):
        unlike = pa.ArrowInvalid("records and lines do not match")
        raise _bad_record(part, lines, column, is_tokens) or unreadable(part.file, unlike)
    return values


def _bad_record(part: FilePart, lines: list[tuple[int, bytes]], column: str, is_tokens: bool) -> SpecError | None:
    """Find the first record that cannot be read; None if there is none."""
    for number, line in lines:
        why, fix = "", "mend it, or leave it out"
        try:
            value = check_object(line).get(column)
            whole = isinstance(value, list) and all(type(one) is int for one in value)
            if value is None:
                why, fix = f'has no "{column}"', "leave such rows out"
            elif not (whole if is_tokens else isinstance(value, str)):
                why = f"{column} is not {'a list of whole numbers' if is_tokens else 'text'}"
        except ValueError as error:
            why = str(error)
        if why:
            return unreadable(_place(part, number), ValueError(why), fix)
    return None


def _place(part: FilePart, number: int) -> str:
    """Name a line by its number in the file, given that within a part; lines before the part are counted only now."""
    before = 0
    if part.first:
        with open_text(Path(part.file)) as file:
            while file.tell() < part.first and file.readline():
                before += 1
    return f"{part.file}, line {before + number + 1}"


def _text(part: FilePart) -> Iterator[Document]:
    held: list[str] = []
    size = 0
    for number, (line, last) in enumerate(_lines(part)):
        try:
            held.append(line.decode())
        except UnicodeDecodeError as error:
            raise unreadable(_place(part, number), error, "save it as UTF-8, or leave it out") from None
        size += len(line)
        if last or size >= TEXT_BYTES:
            yield Document("".join(held), last)
            held, size = [], 0
    if held:
        yield Document("".join(held), False)


def _changed(part: FilePart) -> SpecError:
    return SpecError("data.path", f"{part.file} has changed since the run began", "start a new run")
