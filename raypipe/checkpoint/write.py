"""Write a checkpoint: each worker writes a shard, then the driver writes the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

from torch import Tensor

from raypipe.checkpoint.manifest import put, save_manifest
from raypipe.checkpoint.snapshot import Snapshot
from raypipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One written file, as the manifest lists it; workers send it to the driver."""

    file: str
    """Name within the checkpoint's directory."""
    bytes: int
    sha256: str
    keys: tuple[str, ...]


def step_directory(root: Path, step: int) -> Path:
    """Return the directory for the checkpoint of a step; names sort in the order of steps."""
    return root / f"step-{step:08d}"


def param_key(layer: int, path: str) -> str:
    """Return the key of a parameter; ``layer`` is its layer's number in the whole model.

    >>> param_key(3, "qkv.weight")
    'param/3.qkv.weight'
    """
    return f"param/{layer}.{path}"


def optim_key(layer: int, path: str, state: str) -> str:
    """Return the key of one tensor of a parameter's optimizer state, such as ``exp_avg``."""
    return f"optim/{layer}.{path}/{state}"


def buffer_key(name: str) -> str:
    """Return the key of a buffer that training changes, such as a batch norm's running mean."""
    return f"buffer/{name}"


def write_shard(directory: Path, name: str, tensors: Mapping[str, Tensor]) -> ShardInfo:
    """Write tensors of any dtype and device as ``<name>.safetensors``, bit for bit, and sync it to disk.

    A file of that name is replaced, so the call may be repeated.

    Raises:
        CheckpointError: the file cannot be written.
    """
    snapshot = Snapshot()
    snapshot.take(tensors)
    return write_snapshot(directory, name, snapshot)


def write_snapshot(directory: Path, name: str, snapshot: Snapshot) -> ShardInfo:
    """As ``write_shard``, of tensors that have been copied before.

    The digest is that of the memory, not of the file read back, so it also tells of what a disk did not write.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = directory / f"{name}.safetensors"
    digest, size = hashlib.sha256(), 0

    def write(partial: Path) -> None:
        nonlocal size
        with partial.open("wb", buffering=0) as out:
            for block in snapshot.blocks():
                digest.update(block)
                size += len(block)
                _write_all(out, block)

    put(path, write)
    return ShardInfo(path.name, size, digest.hexdigest(), snapshot.keys)


def _write_all(out: RawIOBase, block: bytes | memoryview) -> None:
    """Write a block to an unbuffered file, which may take only a part of it at a time."""
    left = memoryview(block)
    while left:
        left = left[out.write(left) or 0 :]


def commit(directory: Path, step: int, shards: Iterable[ShardInfo], meta: Mapping[str, Any]) -> Path:
    """Make the shards in ``directory`` a checkpoint by writing their manifest; return the directory.

    ``meta`` is any JSON data, such as the job's name and the validation loss.

    Raises:
        CheckpointError: a shard is missing, two hold the same key, or the manifest cannot be written.
    """
    shards = sorted(shards, key=lambda shard: shard.file)
    keys: dict[str, str] = {}
    for shard in shards:
        if not (directory / shard.file).is_file():
            raise CheckpointError(str(directory), f"{shard.file} is not there", "write all shards to one storage path")
        for key in shard.keys:
            if key in keys:
                raise CheckpointError(
                    str(directory), f"{key} is in {keys[key]} and in {shard.file}", "write each parameter once"
                )
            keys[key] = shard.file
    files = [{"file": shard.file, "bytes": shard.bytes, "sha256": shard.sha256} for shard in shards]
    save_manifest(directory, {"step": step, "files": files, "keys": keys, "meta": dict(meta)})
    return directory
