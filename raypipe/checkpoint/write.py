"""Writing a checkpoint: each stage its shard, then the driver the manifest."""

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
    """One written file, as the manifest lists it; small enough to travel back to the driver."""

    file: str
    """Name within the checkpoint's directory."""
    bytes: int
    sha256: str
    keys: tuple[str, ...]


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies: names sort as steps do."""
    return root / f"step-{step:08d}"


def param_key(layer: int, path: str) -> str:
    """Key of a parameter, by its layer in the whole model.

    >>> param_key(3, "qkv.weight")
    'param/3.qkv.weight'
    """
    return f"param/{layer}.{path}"


def optim_key(layer: int, path: str, state: str) -> str:
    """Key of one tensor of a parameter's optimizer state, such as ``exp_avg``."""
    return f"optim/{layer}.{path}/{state}"


def buffer_key(name: str) -> str:
    """Key of a buffer that training changes, such as a batch norm's running mean."""
    return f"buffer/{name}"


def write_shard(directory: Path, name: str, tensors: Mapping[str, Tensor]) -> ShardInfo:
    """Write one stage's tensors as ``<name>.safetensors``, synced to the disk; bit for bit, any dtype and device.

    Safe to repeat: a file of that name is replaced. Raises CheckpointError if it can't be written.
    """
    owned = _owned(tensors)
    path = directory / f"{name}.safetensors"
    put(path, lambda partial: save_file(owned, partial))
    return ShardInfo(path.name, path.stat().st_size, sha256(path), tuple(sorted(owned)))


def commit(directory: Path, step: int, shards: Iterable[ShardInfo], meta: Mapping[str, Any]) -> Path:
    """Make the shards a checkpoint by writing the manifest over them; returns the directory.

    ``meta`` is any JSON data: job, its hash, how far the data has been read. Raises CheckpointError when a shard is
    missing or two hold the same key.
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
    """The tensors, contiguous and each with memory of its own, as the format wants them; copied only where needed."""
    owned: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        storage = tensor.untyped_storage()
        # A view of a larger buffer (flat parameters) or the second name of a tied one.
        if storage.nbytes() != tensor.numel() * tensor.element_size() or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        owned[key] = tensor
    return owned
