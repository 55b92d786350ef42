"""The manifest of a checkpoint: its files, the tensors in each, and digests to detect damage."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from raypipe.atomic_write import whole
from raypipe.errors import CheckpointError
from raypipe.files import parse_json, read_regular, short

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
