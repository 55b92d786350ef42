"""Files of prepared data: there whole or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(path)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as content:
        blocks: Iterable[bytes] = iter(lambda: content.read(1 << 20), b"")
        for block in blocks:
            found.update(block)
    return found.hexdigest()
