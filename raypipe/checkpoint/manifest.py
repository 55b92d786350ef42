"""The manifest: which files make a checkpoint, what is in which, and how to tell damage."""

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
from raypipe.files import read_regular, short

FORMAT = "raypipe-checkpoint"
VERSION = 1
"""Raised when files or keys change their meaning."""
NAME = "manifest.json"
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Of a file in the folder itself: nothing outside is read, whatever a manifest says."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def save_manifest(directory: Path, body: dict[str, Any]) -> Path:
    """Write a manifest with the format, its version and a digest of itself; returns its path.

    Raises:
        ValueError: a number in ``body`` is not finite, which JSON has no word for.
    """
    everything = {"format": FORMAT, "version": VERSION, **body}
    everything["sha256"] = _digest(everything)
    text = json.dumps(everything, indent=1, allow_nan=False)
    path = directory / NAME
    put(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


def put(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file of a checkpoint, whole or not at all, so that it survives a power cut.

    Raises:
        CheckpointError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, synced=True) as partial:
            write(partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), f"can't be written: {error}", "free or change the storage path") from None


def load_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest back.

    Its ``step`` is a whole number, ``files`` a list of ``{file, bytes, sha256}``, ``keys`` a key's file, ``meta`` a
    dict. Raises CheckpointError for a path that is no checkpoint, an unfinished one, a manifest that is damaged or has
    other values than these, or another version.
    """
    if not directory.is_dir():
        why = "is a file, not a checkpoint's folder" if directory.exists() else "does not exist"
        raise CheckpointError(str(directory), why, "give a step-... folder of a run")
    path = directory / NAME
    try:
        whole = json.loads(read_regular(path))
    except FileNotFoundError:
        if any(directory.glob("*.safetensors*")):
            raise CheckpointError(
                str(directory), f"was never finished: it has no {NAME}", "use an earlier checkpoint"
            ) from None
        raise CheckpointError(str(directory), f"is not a checkpoint: no {NAME}", "give a step-... folder") from None
    except RecursionError:
        raise CheckpointError(str(path), "is damaged: nested too deeply", "use an earlier checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"is damaged: {error}", "use an earlier checkpoint") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(str(path), "is not a raypipe checkpoint's manifest", "give a step-... folder of a run")
    version = whole.get("version")
    if version != VERSION or type(version) is not int:
        age, fix = ("a newer", "update raypipe") if type(version) is int and version > VERSION else ("an older", "")
        raise CheckpointError(
            str(path),
            f"has format version {short(repr(version))}, {age} one than this raypipe's {VERSION}",
            fix or "read it with the raypipe that wrote it, or train anew",
        )
    if whole.pop("sha256", None) != _digest(whole):
        raise CheckpointError(str(path), "is damaged: its content differs from its digest", "use an earlier checkpoint")
    if (wrong := _wrong(whole)) is not None:
        raise CheckpointError(str(path), f"is no manifest of a checkpoint: {wrong}", "use an earlier checkpoint")
    return whole


def _wrong(body: dict[str, Any]) -> str | None:
    """The first key that is not what ``commit`` writes; None where all are."""
    kinds: tuple[tuple[str, type, str], ...] = (
        ("step", int, "a whole number"), ("files", list, "a list"), ("keys", dict, "an object"),
        ("meta", dict, "an object"),
    )  # fmt: skip
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


def _digest(body: dict[str, Any]) -> str:
    # Through JSON once more, so that what is hashed is what a reader will see (tuples are lists there).
    return hashlib.sha256(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode()).hexdigest()
