"""Find the text files that ``data.path`` names, in a fixed order."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The text files of a corpus, sorted by name, and how many files were skipped."""

    files: tuple[TextFile, ...]
    binary: int
    """Files that hold a NUL byte."""
    empty: int


def find_text(source: str) -> Found:
    """Find the text files that ``stdlib``, a file, a folder (recursively, without hidden ones) or a glob names.

    A file is text if it holds no NUL byte.

    Raises:
        SpecError: there are no files, none of them is text, or one cannot be read.
    """
    root, candidates = _candidates(source)
    texts: list[TextFile] = []
    binary = empty = 0
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in candidates):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SpecError(
                "data.path", f"can't read {path}: {error.strerror}", "make it readable or move it"
            ) from None
        if not content:
            empty += 1
        elif b"\0" in content:
            binary += 1
        else:
            texts.append(TextFile(name, path, len(content)))
    if not texts:
        left_out = f"{binary} binary and {empty} empty files" if binary or empty else "no files"
        raise SpecError("data.path", f'"{source}" holds no text: {left_out}', "give a file, folder or glob of text")
    return Found(tuple(texts), binary, empty)


def _candidates(source: str) -> tuple[Path, list[Path]]:
    """Return the root that names are relative to, and the files."""
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, [path for path in _walk(root, _NOT_LIBRARY) if path.suffix == ".py"]
    path = expanded(Path(source))
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        return path, list(_walk(path, frozenset()))
    if glob.has_magic(source):
        found = [Path(match) for match in glob.glob(str(path), recursive=True)]
        files = [match for match in found if match.is_file()]
        if files:
            return Path(os.path.commonpath([file.parent for file in files])), files
        raise SpecError("data.path", f'no file matches "{source}"', "check the pattern; ** goes into sub-folders")
    raise SpecError("data.path", f'"{source}" does not exist', "give a file, folder or glob of text, or stdlib")


def _walk(root: Path, excluded: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files below a folder, without following links to folders."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in excluded and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
