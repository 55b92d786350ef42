"""Write a checkpoint: each worker writes a shard, then the driver writes the manifest.

The manifest has the checkpoint's files, the tensors in each, and digests to detect damage.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from raypipe.errors import CheckpointError
from raypipe.files import parse_json, read_regular, short, whole

# A copy of tensors in host memory, laid out as the safetensors file that it will be written to.
#
# Training goes on while the copy is written, so its memory is filled at one moment and used again at the next. On a GPU
# the copies are queued behind what the device computes, into pinned memory, and nobody waits for them but the writer.
#
# The format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, the header as JSON,
# and the tensors without gaps. Those with the largest elements come first, so that each begins at a multiple of its
# own.


BLOCK_BYTES = 8 << 20
"""Bytes that are written at once."""
ALIGNMENT = 8
"""The header is padded to a multiple of it."""
NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The format's names of dtypes."""

Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


class Snapshot:
    """The tensors of one moment; ``take`` fills it anew."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: Layout | None = None
        self._header = b""
        self._views: dict[str, Tensor] = {}
        self._size = 0
        self._copied: list[Any] = []
        """Events of the GPUs that are copied from."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the tensors, sorted."""
        return tuple(sorted(self._views))

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors of any dtype, shape, stride and device, bit for bit.

        Nothing may read the copy (``blocks``) meanwhile.

        Raises:
            CheckpointError: the format has no name for a dtype.
        """
        ordered = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
        layout = tuple((key, x.dtype, x.shape) for key, x in ordered)
        gpus = {x.device for x in tensors.values() if x.device.type == "cuda"}
        if layout != self._layout:
            self._lay_out(layout, pinned=bool(gpus))
        for key, x in ordered:
            self._views[key].copy_(x, non_blocking=True)
        self._copied = []
        for device in gpus:
            passed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            passed.record(torch.cuda.current_stream(device))
            self._copied.append(passed)

    def _lay_out(self, layout: Layout, pinned: bool) -> None:
        header: dict[str, Any] = {}
        end = 0
        for key, dtype, shape in layout:
            if dtype not in NAMES:
                raise CheckpointError(key, f"has dtype {dtype}, which safetensors files cannot hold", "convert it")
            begin, end = end, end + shape.numel() * dtype.itemsize
            header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._views.clear()
        if end > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before there is another
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        for key, dtype, shape in layout:
            begin, until = header[key]["data_offsets"]
            self._views[key] = self._memory[begin:until].view(dtype).view(shape)
        self._header, self._layout, self._size = struct.pack("<Q", len(text)) + text, layout, end

    def blocks(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file, once all copies are complete."""
        for passed in self._copied:
            passed.synchronize()
        yield self._header
        data = self._memory.numpy().data
        for begin in range(0, self._size, BLOCK_BYTES):
            yield data[begin : min(self._size, begin + BLOCK_BYTES)]


FORMAT = "raypipe-checkpoint"
VERSION = 1
"""Format version; it is increased when files or keys change their meaning."""
NAME = "manifest.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Name of a file in the folder itself, so that a manifest cannot name files outside it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def save_manifest(directory: Path, body: dict[str, Any]) -> Path:
    """Write a manifest with the format, its version and a digest of itself; return its path.

    Raises:
        ValueError: a number in ``body`` is not finite, which JSON cannot represent.
        CheckpointError: the file cannot be written.
    """
    everything = {"format": FORMAT, "version": VERSION, **body}
    everything["sha256"] = _digest(everything)
    text = _text(everything)
    path = directory / NAME
    put(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


def put(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file of a checkpoint atomically and durably; ``write`` fills the temporary file it is given.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, synced=True) as partial:
            write(partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"can't be written: {error}", "free or change the storage path") from None


def load_manifest(directory: Path) -> dict[str, Any]:
    """Read and check a manifest.

    Returns:
        A dict in which ``step`` is an integer, ``files`` a list of ``{file, bytes, sha256}``, ``keys`` maps keys to
        files, and ``meta`` is a dict.

    Raises:
        CheckpointError: the path is not a checkpoint, the checkpoint is unfinished, or the manifest is damaged,
            malformed or of another version.
    """
    if not directory.is_dir():
        why = "is a file, not a checkpoint's folder" if directory.exists() else "does not exist"
        raise CheckpointError(str(directory), why, "give a step-... folder of a run")
    path = directory / NAME
    try:
        content = read_regular(path)
        body = parse_json(content)
    except FileNotFoundError:
        if any(directory.glob("*.safetensors*")):
            raise CheckpointError(
                str(directory), f"was never finished: it has no {NAME}", "use an earlier checkpoint"
            ) from None
        raise CheckpointError(str(directory), f"is not a checkpoint: no {NAME}", "give a step-... folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"is damaged: {error}", "use an earlier checkpoint") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(str(path), "is not a raypipe checkpoint's manifest", "give a step-... folder of a run")
    version = body.get("version")
    if version != VERSION or type(version) is not int:
        age, fix = ("a newer", "update raypipe") if type(version) is int and version > VERSION else ("an older", "")
        raise CheckpointError(
            str(path),
            f"has format version {short(repr(version))}, {age} one than this raypipe's {VERSION}",
            fix or "read it with the raypipe that wrote it, or train anew",
        )
    # The digest is of the data. Bytes that read as the same data (0.30 for 0.3, a space more) are damage as well.
    same_bytes = _text(body).encode() == content
    if body.pop("sha256", None) != _digest(body) or not same_bytes:
        raise CheckpointError(str(path), "is damaged: its content differs from its digest", "use an earlier checkpoint")
    if (wrong := _wrong(body)) is not None:
        raise CheckpointError(str(path), f"is not a checkpoint's manifest: {wrong}", "use an earlier checkpoint")
    return body


def _wrong(body: dict[str, Any]) -> str | None:
    """Describe the first key that ``commit`` would not have written so; None if all are right."""
    kinds: tuple[tuple[str, type, str], ...] = (
        ("step", int, "a whole number"),
        ("files", list, "a list"),
        ("keys", dict, "an object"),
        ("meta", dict, "an object"),
    )
    for key, kind, noun in kinds:
        if type(body.get(key)) is not kind:
            return f"{key} is not {noun}"
    if body["step"] < 0:
        return "step is below 0"
    names: set[str] = set()
    for place, entry in enumerate(body["files"]):
        where = f"files[{place}]"
        if not isinstance(entry, dict) or entry.keys() != {"file", "bytes", "sha256"}:
            return f"{where} is not an object with file, bytes and sha256"
        if not isinstance(entry["file"], str) or not _FILE.fullmatch(entry["file"]):
            return f"{where}.file is not the name of a file in its folder"
        if type(entry["bytes"]) is not int or entry["bytes"] < 0:
            return f"{where}.bytes is not a size"
        if not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
            return f"{where}.sha256 is not a digest"
        if entry["file"] in names:
            return f"{where}.file is listed twice"
        names.add(entry["file"])
    lost = next((key for key, file in body["keys"].items() if not isinstance(file, str) or file not in names), None)
    return None if lost is None else f"keys: {short(lost)} is in none of its files"


def _text(everything: dict[str, Any]) -> str:
    return json.dumps(everything, indent=1, allow_nan=False)


def _digest(body: dict[str, Any]) -> str:
    # Encoded and decoded first, so that the digest is that of the data a reader will see (tuples become lists).
    return hashlib.sha256(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode()).hexdigest()


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


def rows_key(rows: range) -> str:
    """Return what follows the key of a tensor that is stored in several pieces, in the key of these rows."""
    return f"[{rows.start}:{rows.stop}]"


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
