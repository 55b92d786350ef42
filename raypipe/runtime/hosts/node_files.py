"""This node's files of a run whose directory it does not share: see ``sent_files``."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.checkpoint import ShardInfo
from raypipe.errors import ClusterError
from raypipe.files import sha256
from raypipe.runtime.setup.communicators import own_address

CHUNK_BYTES = 32 << 20
"""Largest piece of a file that is in the object store at once."""
PARTIAL = ".partial"
Listing = Mapping[str, tuple[int, str]]
"""Per file of a folder, by its path inside: bytes and SHA-256."""


@dataclass(frozen=True, slots=True)
class SentShard:
    """A shard of a checkpoint in the object store."""

    info: ShardInfo
    chunks: tuple[Any, ...]
    """References of its pieces, in order."""


def node_folder(run: str) -> Path:
    """Return this node's folder for a run's files, which only this user can enter; ``run`` identifies the run.

    Raises:
        ClusterError: the path is taken by another user.
    """
    key = hashlib.sha256(f"{run} {own_address()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"raypipe-files-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise ClusterError(str(folder), "belongs to another user", "remove it, or set TMPDIR on that node")
    folder.chmod(0o700)
    return folder


def begin_folder(run: str, name: str, listing: Listing) -> bool:
    """Prepare to take a folder; return whether it is here already, unchanged."""
    folder = node_folder(run) / name
    if folder.is_dir() and listed(folder) == dict(listing):
        return True
    partial = folder.with_name(folder.name + PARTIAL)
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    for file in listing:
        (partial / file).parent.mkdir(parents=True, exist_ok=True)
        (partial / file).touch()
    return False


def take_chunk(run: str, name: str, file: str, offset: int, data: bytes) -> None:
    """Write a piece of a file."""
    with (node_folder(run) / (name + PARTIAL) / file).open("r+b") as out:
        out.seek(offset)
        out.write(data)


def end_folder(run: str, name: str, listing: Listing) -> None:
    """Verify a folder whose pieces have all been taken, and put it in its place.

    Raises:
        ClusterError: a file is not what the driver sent.
    """
    folder = node_folder(run) / name
    partial = folder.with_name(folder.name + PARTIAL)
    if (found := listed(partial)) != dict(listing):
        wrong = sorted(file for file in {*found, *listing} if found.get(file) != listing.get(file))
        raise ClusterError(
            f"node {own_address()}",
            f"did not take {wrong[0]} of {name} as the driver sent it: its disk may be full",
            f"free space under {folder.parent}, or set TMPDIR on that node",
        )
    partial.rename(folder)


def clear_files(run: str) -> None:
    """Delete what this node took for a run."""
    shutil.rmtree(node_folder(run), ignore_errors=True)


def listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the files of a folder with their sizes and digests."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, sha256(path)) for path in files}


def chunks_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a file with their offsets."""
    offset = 0
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            yield offset, data
            offset += len(data)
