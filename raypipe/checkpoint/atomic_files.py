"""Files that are there whole or not at all, and the digests that prove it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from raypipe.errors import CheckpointError


def put(path: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a temporary file beside ``path``, then move it there; both survive a power cut.

    Raises CheckpointError if the disk refuses.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)  # the new name is in the folder, which is a file of its own
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise CheckpointError(str(path), f"can't be written: {error}", "free or change the storage path") from None


def sha256(path: Path) -> str:
    """Hex digest of a file's content, read a mebibyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's or a folder's content is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
