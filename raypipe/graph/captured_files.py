"""The cache of captured models: a folder of JSON documents, each with a file of buffers and constants.

It is below ``$RAYPIPE_CACHE_DIR``, else ``$XDG_CACHE_HOME/raypipe``, else ``~/.cache/raypipe``. Nothing that is read is
executed. Files are written atomically; a damaged one is ignored with a notice, and written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from raypipe.atomic_write import write_whole
from raypipe.files import open_regular, read_json
from raypipe.graph.calls import Call
from raypipe.graph.document import from_document, to_document
from raypipe.graph.operations import OperationGraph

Notify = Callable[[str], None]


def cache_folder() -> Path:
    """Return the folder of captured models."""
    own = os.environ.get("RAYPIPE_CACHE_DIR")
    if own:
        return Path(own) / "captured"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypipe" / "captured"


def to_stderr(message: str) -> None:
    """Print a notice to stderr."""
    print(message, file=sys.stderr)


def load_operations(
    key: str, folder: Path | None = None, notify: Notify = to_stderr
) -> tuple[OperationGraph, tuple[Call, ...], str] | None:
    """Read the operations cached under ``key`` and the digest of their values; None if missing or damaged."""
    path = (folder or cache_folder()) / f"{key}.json"
    try:
        document = read_json(path)
        return *from_document(document), str(document["values"])
    except FileNotFoundError:
        return None
    except OSError as error:
        notify(f"ignored {path}: {error.strerror}")
        return None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        notify(f"ignored {path}: it is damaged ({type(error).__name__}: {error})")
        return None


def load_values(key: str, digest: str, folder: Path | None = None, notify: Notify = to_stderr) -> bytes | None:
    """Read the values cached under ``key``, in safetensors format; None if missing, or not those of ``digest``."""
    path = (folder or cache_folder()) / f"{key}.safetensors"
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        notify(f"ignored {path}: {error.strerror}")
        return None
    if hashlib.sha256(content).hexdigest() != digest:
        notify(f"ignored {path}: it is damaged")
        return None
    return content


def save(
    key: str,
    graph: OperationGraph,
    calls: Sequence[Call],
    values: bytes,
    folder: Path | None = None,
    notify: Notify = to_stderr,
) -> None:
    """Cache a captured model. If the folder cannot be written, a notice says so, and it is captured again next time."""
    where = folder or cache_folder()
    document = to_document(graph, calls) | {"values": hashlib.sha256(values).hexdigest()}
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_whole(where / f"{key}.safetensors", values)
        write_whole(where / f"{key}.json", json.dumps(document, separators=(",", ":")).encode())
    except OSError as error:
        notify(f"the captured model is not cached: {where}: {error.strerror}")
