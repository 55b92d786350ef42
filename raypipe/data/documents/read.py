"""Read the documents of a block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from raypipe.data.documents.blocks import Block
from raypipe.data.documents.sources import Format, Part, damaged
from raypipe.errors import SpecError
from raypipe.files import open_regular

TEXT_BYTES = 64 << 10
"""Text files are cut at line ends into documents of about this size."""
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
                continue
            if format == "jsonl":
                columns: Iterator[pa.Array] = _json(part, column, is_tokens)
            else:
                columns = (_parquet if format == "parquet" else _arrow)(part, column)
            row = part.first
            for values in columns:
                if values.null_count:
                    number = row + values.is_null().to_pylist().index(True)
                    where = f"a record from byte {part.first} on" if format == "jsonl" else f"row {number}"
                    why = f'{part.file}: {where} of group {part.group} has no "{column}"'
                    raise SpecError("data.path", why, "leave such rows out")
                row += len(values)
                yield from (Document(value, True) for value in values.to_pylist())
        except (pa.ArrowInvalid, pa.ArrowTypeError, OSError, UnicodeDecodeError) as error:
            raise damaged(part.file, error) from None


def _parquet(part: Part, column: str) -> Iterator[pa.Array]:
    with pq.ParquetFile(part.file, memory_map=True) as file:
        skip, left = part.first, part.rows
        for batch in file.iter_batches(ROWS, row_groups=[part.group], columns=[column], use_threads=False):
            values = batch.column(0)[skip : skip + left]
            skip = max(0, skip - batch.num_rows)
            left -= len(values)
            if len(values):
                yield values
            if not left:
                return
    raise _changed(part)


def _arrow(part: Part, column: str) -> Iterator[pa.Array]:
    with pa.memory_map(part.file) as content, pa.ipc.open_stream(content) as stream:
        for number, batch in enumerate(stream):
            if number == part.group:
                yield batch.column(column)[part.first : part.first + part.rows]
                return
    raise _changed(part)


def _lines(part: Part) -> Iterator[tuple[bytes, bool]]:
    """Yield the lines that begin within a range of bytes, and whether each is the file's last."""
    with open_regular(Path(part.file)) as file:
        end = part.first + part.rows
        if part.first:
            file.seek(part.first - 1)
            file.readline()
        while file.tell() < end and (line := file.readline()):
            yield line, not file.peek(1)  # type: ignore[attr-defined]


def _json(part: Part, column: str, is_tokens: bool) -> Iterator[pa.Array]:
    content = b"".join(line for line, _ in _lines(part) if line.strip())
    if not content:
        return
    kind = pa.list_(pa.int64()) if is_tokens else pa.string()
    options = pyarrow.json.ParseOptions(pa.schema([(column, kind)]), unexpected_field_behavior="ignore")
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    table = pyarrow.json.read_json(pa.BufferReader(content), reading, options)
    yield from table.column(column).chunks


def _text(part: Part) -> Iterator[Document]:
    held: list[bytes] = []
    size = 0
    for line, last in _lines(part):
        held.append(line)
        size += len(line)
        if last or size >= TEXT_BYTES:
            yield Document(b"".join(held).decode(), last)
            held, size = [], 0
    if held:
        yield Document(b"".join(held).decode(), False)


def _changed(part: Part) -> SpecError:
    return SpecError("data.path", f"{part.file} has changed since the run began", "start a new run")
