"""Write a checkpoint: each worker writes a shard, then the driver writes the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from raypipe.checkpoint.manifest import put, save_manifest
from raypipe.errors import CheckpointError
from raypipe.files import sha256


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
    owned = _owned(tensors)
    path = directory / f"{name}.safetensors"
    put(path, lambda partial: save_file(owned, partial))
    return ShardInfo(path.name, path.stat().st_size, sha256(path), tuple(sorted(owned)))


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


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tensors contiguous with storage of their own, as the format requires; copy only where needed."""
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        # Copy a view of a larger buffer (flat parameters), and the second name of a tied parameter.
        if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        owned[key] = tensor
    return owned
