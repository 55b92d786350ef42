"""Files that a verb writes: looked at before the work is done, and one error where they can't be written after all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError
from raypipe.files import is_url

OTHER = "give another file"


def output(option: str) -> Callable[[str], Path]:
    """Reads the value of an option that names a file or a directory to write, as it was typed.

    Raises (when it is called):
        SpecError: an empty name, which ``Path`` takes for the current folder, or a URL, which it takes for a folder.
    """

    def read(text: str) -> Path:
        if not text.strip():
            raise SpecError(option, "is empty", "name what to write")
        if is_url(text):
            raise SpecError(
                option, f"{text} is a URL, and only local paths are written", "give a path, and copy it there"
            )
        if "\0" in text:
            raise SpecError(option, "holds a NUL character, which no path does", "name what to write")
        return Path(text)

    return read


def check_writable(path: Path) -> None:
    """Refuse a file that can't be written, before anything is computed for it.

    Raises:
        SpecError: no such folder, a folder in the file's place, or no permission.
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
    """Write the text.

    Raises:
        SpecError: the disk is full, or whatever else the system says.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise SpecError(str(path), f"can't be written: {error.strerror}", OTHER) from None
