"""Files for nodes that do not share the run's directory, through Ray's object store.

The driver sends such a node the prepared data, and the checkpoint to resume from, into a folder of the node's own. One
worker of the node takes them; all of its workers read them there. A checkpoint's shards go the other way: a worker puts
its shard into the object store, and the driver writes it into the run's directory. Every file is verified by its digest
and appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

from raypipe.checkpoint import ShardInfo
from raypipe.checkpoint.write import put
from raypipe.errors import CheckpointError, ClusterError
from raypipe.files import sha256
from raypipe.runtime.setup.communicators import own_address

CHUNK_BYTES = 32 << 20
"""Largest piece of a file that is in the object store at once."""
AT_ONCE = 4
"""Pieces under way to the nodes."""
PARTIAL = ".partial"
Listing = Mapping[str, tuple[int, str]]
"""Per file of a folder, by its path inside: bytes and SHA-256."""


@dataclass(frozen=True, slots=True)
class SentShard:
    """A shard of a checkpoint in the object store."""

    info: ShardInfo
    chunks: tuple[Any, ...]
    """References of its pieces, in order."""


class NodeFiles(NamedTuple):
    """Where a node that does not share the run's directory has its files."""

    data: Path
    """Folder of the prepared data."""
    checkpoint: Path | None
    """The checkpoint to resume from."""


# What a worker does on its node.


def node_folder(run: str) -> Path:
    """Return this node's folder for a run's files, which only this user can enter; ``run`` identifies the run.

    Raises:
        ClusterError: the path is taken by another user.
    """
    key = hashlib.sha256(f"{run} {own_address()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"raypipe-files-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    result = folder.lstat()
    if result.st_uid != os.getuid() or not stat.S_ISDIR(result.st_mode):
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
    if (result := listed(partial)) != dict(listing):
        wrong = sorted(file for file in {*result, *listing} if result.get(file) != listing.get(file))
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


# What the driver does.


def run_key(directory: Path) -> str:
    """Return what identifies a run among all nodes."""
    return f"{own_address()} {directory.resolve()}"


def send_folder(actors: Sequence[Any], folder: Path, run: str, name: str) -> list[Path]:
    """Send all files of a folder to nodes, each by a worker of its own; return its path on each of them.

    Raises:
        ClusterError: a node did not take a file as it was sent.
    """
    listing = listed(folder)
    here = ray.get([actor.on_node.remote("begin_folder", run, name, listing) for actor in actors])
    missing = [actor for actor, has in zip(actors, here, strict=True) if not has]
    pending: deque[list[Any]] = deque()
    for file in listing if missing else ():
        for offset, data in chunks_of(folder / file):
            chunk = ray.put(data)
            pending.append([actor.on_node.remote("take_chunk", run, name, file, offset, chunk) for actor in missing])
            if len(pending) >= AT_ONCE:
                ray.get(pending.popleft())
    for calls in pending:
        ray.get(calls)
    ray.get([actor.on_node.remote("end_folder", run, name, listing) for actor in missing])
    at: list[Path] = ray.get([actor.on_node.remote("node_folder", run) for actor in actors])
    return [root / name for root in at]


def received(directory: Path, shard: ShardInfo | SentShard) -> ShardInfo:
    """Write a shard into a checkpoint's directory, if its worker could not; return what the manifest lists.

    Raises:
        CheckpointError: it cannot be written, or is not what the worker sent.
    """
    if isinstance(shard, ShardInfo):
        return shard
    path = directory / shard.info.file
    digest = hashlib.sha256()

    def write(partial: Path) -> None:
        with partial.open("wb") as out:
            for chunk in shard.chunks:
                data = ray.get(chunk)
                digest.update(data)
                out.write(data)

    put(path, write)
    if digest.hexdigest() != shard.info.sha256:
        path.unlink()
        raise CheckpointError(str(path), "is not what its worker sent", "run again; the network or memory is at fault")
    return shard.info


def files_of_nodes(apart: Mapping[str, Any], directory: Path, checkpoint: Path | None) -> dict[str, NodeFiles]:
    """Send the data, and the checkpoint to resume from, to the nodes that do not share the run's directory.

    Args:
        apart: a worker of each of these nodes, by Ray's id of the node.
        directory: the run's directory.
        checkpoint: where to resume from; None to start afresh.

    Returns:
        By node, where its files are.

    Raises:
        ClusterError: a node did not take a file as it was sent.
    """
    if not apart:
        return {}
    run, actors = run_key(directory), list(apart.values())
    data = send_folder(actors, directory / "data", run, "data")
    resumed: Sequence[Path | None] = [None] * len(actors)
    if checkpoint is not None:
        resumed = send_folder(actors, checkpoint, run, "checkpoint")
    return {node: NodeFiles(*places) for node, places in zip(apart, zip(data, resumed, strict=True), strict=True)}


def clear(apart: Mapping[str, Any], directory: Path) -> None:
    """Have the nodes delete what they took for a run."""
    ray.get([actor.on_node.remote("clear_files", run_key(directory)) for actor in apart.values()])
