"""The manifest: which files make a checkpoint, what is in which, and how to tell damage."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from raypipe.checkpoint.files import put
from raypipe.errors import CheckpointError

FORMAT = "raypipe-checkpoint"
VERSION = 1
"""Raised when files or keys change their meaning."""
NAME = "manifest.json"


def save_manifest(directory: Path, body: dict[str, Any]) -> Path:
    """Write a manifest with the format, its version and a digest of itself; returns its path."""
    whole = {"format": FORMAT, "version": VERSION, **body}
    whole["sha256"] = _digest(whole)
    text = json.dumps(whole, indent=1, allow_nan=True)
    path = directory / NAME
    put(path, lambda partial: _write_text(partial, text))
    return path


def load_manifest(directory: Path) -> dict[str, Any]:
    """Read a manifest back.

    Raises CheckpointError for a path that is no checkpoint, an unfinished one, a damaged manifest, or another version.
    """
    if not directory.is_dir():
        why = "is a file, not a checkpoint's folder" if directory.exists() else "does not exist"
        raise CheckpointError(str(directory), why, "give a step-... folder of a run")
    path = directory / NAME
    try:
        whole = json.loads(path.read_bytes())
    except FileNotFoundError:
        if any(directory.glob("*.safetensors*")):
            raise CheckpointError(
                str(directory), f"was never finished: it has no {NAME}", "use an earlier checkpoint"
            ) from None
        raise CheckpointError(str(directory), f"is not a checkpoint: no {NAME}", "give a step-... folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), f"is damaged: {error}", "use an earlier checkpoint") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise CheckpointError(str(path), "is not a raypipe checkpoint's manifest", "give a step-... folder of a run")
    version = whole.get("version")
    if version != VERSION:
        age, fix = ("a newer", "update raypipe") if isinstance(version, int) and version > VERSION else ("an older", "")
        raise CheckpointError(
            str(path),
            f"has format version {version}, {age} one than this raypipe's {VERSION}",
            fix or "read it with the raypipe that wrote it, or train anew",
        )
    if whole.pop("sha256", None) != _digest(whole):
        raise CheckpointError(str(path), "is damaged: its content differs from its digest", "use an earlier checkpoint")
    return whole


def _digest(body: dict[str, Any]) -> str:
    # Through JSON once more, so that what is hashed is what a reader will see (tuples are lists there).
    return hashlib.sha256(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
