"""Find the text files that ``data.path`` names, in a fixed order."""

from __future__ import annotations

import glob
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from raypipe.data.given_files import Format, check_content, find_files, kind_of, looks_like, read_text
from raypipe.errors import SpecError
from raypipe.files import expanded

STDLIB = "stdlib"
"""The ``data.path`` that stands for the sources of Python's standard library."""
# Without installed packages, which are not part of it, and without tests and generated tables, which are bulky.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of text, with the name that decides its position and its split."""

    name: str
    """Path relative to the corpus's root, with forward slashes: the same on every machine."""
    path: Path
    format: Format | None
    """By its name."""
    bytes: int
    """Of its text: uncompressed, without a byte order mark."""


@dataclass(frozen=True, slots=True)
class Found:
    """The text files of a corpus, sorted by name, and how many files were skipped."""

    files: tuple[TextFile, ...]
    binary: int
    """Files that hold a NUL byte."""
    empty: int


def find_text(source: str, raw: bool = True) -> Found:
    """Find the text files that ``stdlib``, a file, a folder (recursively, without hidden ones) or a glob names.

    A file is text if it holds no NUL byte, once it is uncompressed as its name says. Without ``raw``, JSON in a
    file that is not named so is an error.

    Raises:
        SpecError: there are no files, none of them is text, one cannot be read, or one that is named as text is not.
    """
    if source == STDLIB:
        found = find_files(sysconfig.get_paths()["stdlib"], _NOT_LIBRARY)
        found = [file for file in found if file.path.suffix == ".py"]
    else:
        found = find_files(source)
    texts: list[TextFile] = []
    empty = 0
    binary: list[str | None] = []
    for file in found:
        format = kind_of(file.path).format
        if format in ("parquet", "arrow"):
            binary.append("Parquet")
            continue
        check_content(file.path, raw=raw)
        content = read_text(file.path)
        if not content:
            empty += 1
        elif b"\0" in content and format == "jsonl":
            raise SpecError(
                "data.path", f"{file.path} holds a NUL byte, which JSON does not", "mend it, or leave it out"
            )
        elif b"\0" in content:
            binary.append(looks_like(content))
        else:
            texts.append(TextFile(file.name, file.path, format, len(content)))
    if not texts:
        raise _no_text(source, binary, empty)
    return Found(tuple(texts), len(binary), empty)


def _no_text(source: str, binary: list[str | None], empty: int) -> SpecError:
    if not binary and not empty and not expanded(Path(source)).exists():
        why = f'no file matches "{source}"' if glob.has_magic(source) else f'"{source}" does not exist'
        fix = "give a file, folder or glob (** goes into sub-folders) of text, or stdlib"
        return SpecError("data.path", why, fix)
    left_out = f"{len(binary)} binary and {empty} empty files" if binary or empty else "no files"
    tables = "Parquet" in binary or "Arrow" in binary
    fix = "data.type: documents reads Parquet and Arrow" if tables else "give a file, folder or glob of text"
    return SpecError("data.path", f'"{source}" holds no text: {left_out}', fix)
