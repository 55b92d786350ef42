"""Output files of verbs: they are checked before the work is done, and errors of writing are one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError
from raypipe.files import is_url

OTHER = "give another file"


def output(option: str) -> Callable[[str], Path]:
    """Return a parser for an option that names a file or directory to write.

    The parser raises a SpecError for an empty name, which ``Path`` would take for the current folder, and for a URL,
    which it would take for a folder.
    """

    def read(text: str) -> Path:
        if not text.strip():
            raise SpecError(option, "is empty", "give a path")
        if is_url(text):
            raise SpecError(
                option, f"{text} is a URL, but only local paths can be written", "give a local path, then copy the file"
            )
        if "\0" in text:
            raise SpecError(option, "contains a NUL character", "give a path")
        return Path(text)

    return read


def check_writable(path: Path) -> None:
    """Check that a file can be written, before anything is computed for it.

    Raises:
        SpecError: its folder does not exist, it is a folder itself, or there is no permission.
    """
    if path.is_dir():
        raise SpecError(str(path), "is a folder", "give the file's name too")
    if not path.parent.is_dir():
        raise SpecError(str(path), "there is no such folder", "make it, or give another file")
    # A file is written beside its place and then moved there, which takes permission for both.
    places = [path, path.parent] if path.is_file() else [path if path.exists() else path.parent]
    if not all(os.access(place, os.W_OK) for place in places):
        raise SpecError(str(path), "can't be written: no permission", OTHER)


def write(path: Path, text: str) -> None:
    """Write text to a file.

    Raises:
        SpecError: the system cannot write it, for example because the disk is full.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(str(path), f"can't be written: {error.strerror}", OTHER) from None


def described_cluster(name: str) -> Path:
    """``--cluster`` as it was typed: the path or the name of a description; tells where it is now if it has moved."""
    from raypipe.job.cluster import cluster_file, moved_note

    if (note := moved_note(Path(name))) is not None:
        print(note, file=sys.stderr)
    return cluster_file(Path(name))
