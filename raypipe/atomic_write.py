"""Files and folders that are there whole or not at all: made under another name beside their place, then renamed.

The other name is nobody else's, so several processes may write the same file: the last one to finish wins.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path, *, folder: bool = False, synced: bool = False) -> Iterator[Path]:
    """A temporary path for the content of ``path``, moved there at the end of the block, and removed if that fails.

    Args:
        path: what is written. Its folder is there. A file is replaced, and so is an empty folder.
        folder: the temporary path is a new folder; otherwise the block creates a file, or a link, under that name.
        synced: content and name survive a power cut.

    Raises:
        OSError: the disk refuses; and whatever the block raises.
    """
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        if folder:
            partial.mkdir()
        yield partial
        if synced:
            _sync(partial)
        partial.replace(path)
        if synced:
            _sync(path.parent)  # the new name is in the folder, which is a file of its own
    except BaseException:
        if folder:
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()
        raise


def write_whole(path: Path, content: bytes | str, *, synced: bool = False) -> None:
    """Write a file so that it is there whole or not at all: a crash in the middle leaves what was there before.

    What a link points to is replaced, not the link. A pipe or a terminal, which nothing can replace, is written to.

    Args:
        path: the file.
        content: its bytes; a text is encoded as UTF-8.
        synced: as in ``whole``.

    Raises:
        OSError: the disk refuses.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with whole(path.resolve() if path.is_symlink() else path, synced=synced) as partial:
        partial.write_bytes(data)


def _sync(path: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
