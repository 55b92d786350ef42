"""Read the documents of a block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from raypipe.data.documents.sources import Block, FilePart, arrow_batches
from raypipe.data.given_files import BOM, UNREADABLE, Format, check_object, kind_of, open_text, unreadable
from raypipe.errors import SpecError

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
