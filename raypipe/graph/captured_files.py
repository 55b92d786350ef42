"""Captured models on disk: a folder of JSON documents, with the few values that go with each beside it.

Below ``$RAYPIPE_CACHE_DIR``, else ``$XDG_CACHE_HOME/raypipe``, else ``~/.cache/raypipe``. Nothing that is read is
executed. A file is written under another name and then renamed, so that a reader sees all of it or nothing; a damaged
one is passed over with a notice and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from raypipe.atomic_write import write_whole
from raypipe.graph.calls import Call
from raypipe.graph.document import from_document, to_document
from raypipe.graph.operations import OperationGraph

Notify = Callable[[str], None]


def cache_folder() -> Path:
    """Where captured models are kept."""
    own = os.environ.get("RAYPIPE_CACHE_DIR")
    if own:
        return Path(own) / "captured"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypipe" / "captured"


def to_stderr(message: str) -> None:
    """The usual place of notices."""
    print(message, file=sys.stderr)


def load_operations(
    key: str, folder: Path | None = None, notify: Notify = to_stderr
) -> tuple[OperationGraph, tuple[Call, ...], str] | None:
    """The operations kept under a key, and the digest of the values that belong to them; None if there are none."""
    path = (folder or cache_folder()) / f"{key}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        notify(f"passed over {path}: {error}")
        return None
    try:
        document = json.loads(text)
        return *from_document(document), str(document["values"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        notify(f"passed over {path}: it is damaged ({type(error).__name__}: {error})")
        return None


def load_values(key: str, digest: str, folder: Path | None = None, notify: Notify = to_stderr) -> bytes | None:
    """The values that belong to the operations kept under a key, in safetensors form; None if they are lost."""
    path = (folder or cache_folder()) / f"{key}.safetensors"
    try:
        content = path.read_bytes()
    except OSError as error:
        notify(f"passed over {path}: {error.strerror}")
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        notify(f"passed over {path}: it is damaged")
        return None
    return content


def save(
    key: str, graph: OperationGraph, calls: Sequence[Call], values: bytes, folder: Path | None = None,
    notify: Notify = to_stderr,
) -> None:  # fmt: skip
    """Keep a captured model. A folder that can't be written is no error: then it is captured again next time."""
    where = folder or cache_folder()
    document = to_document(graph, calls) | {"values": hashlib.sha256(values).hexdigest()}
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_whole(where / f"{key}.safetensors", values)
        write_whole(where / f"{key}.json", json.dumps(document, separators=(",", ":")).encode())
    except OSError as error:
        notify(f"the captured model is not kept: {where}: {error.strerror}")
