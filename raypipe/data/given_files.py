"""The files that ``data.path`` names, and what each is: its format, by its name, and how it is compressed.

All readers of files that users give ask here, so that a name means the same to each of them. Content that plainly is of
another format than the name says is an error, since reading it anyway would train on the wrong text.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

from raypipe.errors import SpecError
from raypipe.files import expanded, open_regular, parse_json

Format = Literal["parquet", "arrow", "jsonl", "text"]
SUFFIXES: dict[str, Format] = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".jsonl": "jsonl"}
SUFFIXES |= {".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text", ".md": "text", ".py": "text"}
"""In any case."""
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
"""After the suffix of the format, if any; or alone."""
BOM = b"\xef\xbb\xbf"
"""Byte order mark of UTF-8, which some editors write at the beginning of a file; it is no text."""
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a damaged compressed file raises."""

_HEAD = 64 << 10
_NAMES: dict[str, str] = {"parquet": "Parquet", "arrow": "Arrow", "jsonl": "JSON, an object a line", "text": "text"}
_BINARY = (
    {b"PAR1": "Parquet", b"PARE": "encrypted Parquet", b"ARROW1": "Arrow", b"FEA1": "Feather of version 1"}
    | {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh91AY&SY": "bzip2", b"\xfd7zXZ\0": "xz"}
    | {b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip", b"Obj\x01": "Avro", b"SQLite format 3\0": "SQLite"}
    | {b"\x89HDF": "HDF5", b"\x93NUMPY": "numpy", b"%PDF-": "PDF", b"\xff\xfe": "UTF-16"}
    | {b"\xfe\xff": "UTF-16", b"version https://git-lfs": "a pointer of Git LFS to the file itself"}
)
"""First bytes of formats, of which none is text in UTF-8 that anybody trains on."""


class FileKind(NamedTuple):
    """The kind of a file, by its name."""

    format: Format | None
    """None if the name says nothing."""
    compression: str | None


@dataclass(frozen=True, slots=True)
class GivenFile:
    """One file, with the name that decides its position and its split."""

    name: str
    """Path relative to the folder that was given, with forward slashes: the same on every machine."""
    path: Path


def kind_of(path: Path | str) -> FileKind:
    """Return what a file is by its name.

    >>> kind_of("a.JSONL.gz"), kind_of("notes")
    (FileKind(format='jsonl', compression='gzip'), FileKind(format=None, compression=None))
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    rest = suffixes[: -1 if compression else None]
    return FileKind(SUFFIXES.get(rest[-1]) if rest else None, compression)


def find_files(source: str, excluded: frozenset[str] = frozenset()) -> list[GivenFile]:
    """Find the files that a file, a folder (recursively) or a glob names, by name; none if nothing is there.

    Hidden files and folders in a folder are passed over, as are folders named in ``excluded``, and links to folders.
    """
    path = expanded(Path(source))
    if path.is_file():
        root, result = path.parent, [path]
    elif path.is_dir():
        root, result = path, list(_walk(path, excluded))
    else:
        matches = (Path(match) for match in glob.glob(str(path), recursive=True))
        result = [match for match in matches if match.is_file()]
        root = Path(os.path.commonpath([file.parent for file in result])) if result else path
    return sorted((GivenFile(one.relative_to(root).as_posix(), one) for one in result), key=lambda file: file.name)


def _walk(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in excluded and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file's bytes, uncompressed as its name says; ``UNREADABLE`` are the errors of reading them.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    compression = kind_of(path).compression
    with ExitStack() as opened:
        file = opened.enter_context(open_regular(path))
        if compression == "gzip":
            file = cast(BinaryIO, opened.enter_context(gzip.GzipFile(fileobj=file)))
        elif compression == "zstd":
            import pyarrow as pa  # Ray Train brings it

            file = cast(BinaryIO, io.BufferedReader(opened.enter_context(pa.CompressedInputStream(file, "zstd"))))
        yield file


def read_text(path: Path) -> bytes:
    """Return all bytes of a file, uncompressed, without a byte order mark.

    Raises:
        SpecError: it cannot be read.
    """
    try:
        with open_text(path) as file:
            return file.read().removeprefix(BOM)
    except UNREADABLE as error:
        raise unreadable(str(path), error) from None


def unreadable(where: str, error: BaseException, fix: str = "mend it, or leave it out") -> SpecError:
    """Make the error about a file that cannot be read."""
    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return SpecError("data.path", f"can't read {where}: {why.splitlines()[0]}", fix)


def check_content(path: Path, key: str = "data.path", raw: bool = False) -> None:
    """Check that a file is not plainly of another format than its name says; ``raw``: any text is read as it is.

    A name that says nothing is checked only for records that would be read as text.

    Raises:
        SpecError: it is, or it cannot be read.
    """
    format = kind_of(path).format
    file, compression = str(path), kind_of(path).compression
    if compression and format in ("parquet", "arrow"):
        fix = f"unpack it; {_NAMES[format]} files compress their own columns"
        raise SpecError(key, f"{file} is a compressed {_NAMES[format]} file, which cannot be read in parts", fix)
    try:
        if compression:
            with open_regular(path) as packed:
                begin = packed.read(8)
            if begin and looks_like(begin) != compression:
                fix = f"name it without {path.suffix}, or leave it out"
                raise SpecError(key, f"{file} is named as {compression}, but is not compressed so", fix)
        with open_text(path) as content:
            head = content.read(_HEAD)
    except UNREADABLE as error:
        raise unreadable(file, error) from None
    seen, name = looks_like(head), _NAMES[format or "text"]
    records = seen == _NAMES["jsonl"]
    if seen is None or seen == name or (raw if records else format is None):
        return
    fix = "name it as what it is, or leave it out"
    if seen in COMPRESSIONS.values():
        fix = f"name it {path.name}{'.gz' if seen == 'gzip' else '.zst'}, or unpack it"
    elif records:
        fix = f"name it {path.with_suffix('').name}.jsonl, or leave it out"
    elif seen == "UTF-16":
        fix = "save it as UTF-8, or leave it out"
    raise SpecError(key, f"{file} is read as {name} by its name, but looks like {seen}", fix)


def looks_like(head: bytes) -> str | None:
    """Return the format of a file that begins with some bytes; None for text, and for what is not known.

    >>> looks_like(b"PAR1..."), looks_like(b'{"text": "a"}\\n'), looks_like(b"a line")
    ('Parquet', 'JSON, an object a line', None)
    """
    for begin, name in _BINARY.items():
        if head.startswith(begin):
            return name
    if head.startswith(b"\xff\xff\xff\xff") and head[7:8] == b"\0":  # the first message's length, below 16 MiB
        return "Arrow"
    text = head.removeprefix(BOM).lstrip()
    line = text[: text.find(b"\n") if b"\n" in text else None].strip()
    if line.startswith(b"{") and line.endswith(b"}"):
        try:
            parse_json(line)
        except ValueError:
            return None
        return _NAMES["jsonl"]
    return None


def check_object(line: bytes) -> dict[str, object]:
    """Decode a line of JSON that must be an object.

    Raises:
        ValueError: it is not one; the message says what it is.
    """
    try:
        result = parse_json(line)
    except ValueError as error:
        if line.strip() in (b"{", b"["):
            raise ValueError("not a JSON object: the file is one JSON document of many lines") from None
        raise ValueError(f"not a JSON object: {error}") from None
    if not isinstance(result, dict):
        raise ValueError(f"not a JSON object but a {type(result).__name__}")
    return result
