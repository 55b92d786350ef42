"""Write files and folders atomically: under a temporary name in the same folder, then renamed.

The temporary name is unique, so several processes may write the same file; the last one to finish wins.
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
    """Yield a temporary path; rename it to ``path`` at the end of the block, or remove it if the block fails.

    Args:
        path: the file or folder to write. Its parent must exist. A file or an empty folder there is replaced.
        folder: the temporary path is a new folder; otherwise the block creates a file or a link at the path.
        synced: flush content and name to disk, so that they survive a power failure.

    Raises:
        OSError: the file system refuses the write. Exceptions of the block are passed on.
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
            _sync(path.parent)  # the new name is stored in the folder, which must be flushed separately
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
        OSError: the file system refuses the write.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with whole(path.resolve() if path.is_symlink() else path, synced=synced) as partial:
        partial.write_bytes(data)


def _sync(path: Path) -> None:
    """Wait until the content of a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
