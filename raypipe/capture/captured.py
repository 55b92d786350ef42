"""A captured model as data, and the cache from which processes that never capture anything read it.

The cache is a folder of JSON documents, each with a file of buffers and constants: below ``$RAYPIPE_CACHE_DIR``, else
``$XDG_CACHE_HOME/raypipe``, else ``~/.cache/raypipe``. Nothing that is read is executed. torch's own form
(``torch.export.save``) is not used: it holds the memory of every parameter, torch 2.13 cannot read back a program whose
parameters have none, and what reads it brings the exporter. Files are written atomically; a damaged one is ignored with
a notice, and written again.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter
from safetensors import SafetensorError

from raypipe.files import open_regular, read_regular, write_whole
from raypipe.graph.operations import OperationGraph

if TYPE_CHECKING:  # planning a described cluster from what is cached needs no torch
    from torch import Tensor

Notify = Callable[[str], None]
ROWS = 3
"""Rows of the data on which a whole model is tried, where it cannot be captured."""


def to_stderr(message: str) -> None:
    """Print a notice to stderr."""
    print(message, file=sys.stderr)


@dataclass(frozen=True)
class Captured:
    """A model's forward as data, from which any consecutive operations can be built as a module."""

    graph: OperationGraph
    values: Mapping[str, Tensor]
    """Initial values of the buffers and constants that the operations read."""


def cache_folder() -> Path:
    """Return the folder of captured models."""
    own = os.environ.get("RAYPIPE_CACHE_DIR")
    if own:
        return Path(own) / "captured"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypipe" / "captured"


@dataclass(frozen=True)
class CapturedDocument:
    """The content of a JSON file of the cache."""

    graph: OperationGraph
    values: str
    """SHA-256 of the file of values."""
    form: Literal[2] = 2
    """Version of the format; another one is captured anew."""


DOCUMENTS = TypeAdapter(CapturedDocument)


def captured_once(
    key: str, capture: Callable[[], Captured], folder: Path | None = None, notify: Notify = to_stderr
) -> Captured:
    """Return the captured model that is cached under ``key``, or call ``capture`` and cache its result."""
    kept = load_kept(key, folder, notify)
    if kept is not None:
        return kept
    captured = capture()
    save(key, captured, folder, notify)
    return captured


def load_kept(key: str, folder: Path | None = None, notify: Notify = to_stderr) -> Captured | None:
    """Read the captured model that is cached under ``key``; None if it is missing or damaged."""
    from safetensors import torch as safetensors

    path = (folder or cache_folder()) / f"{key}.json"
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        notify(f"ignored {path}: {error.strerror}")
        return None
    try:
        document = DOCUMENTS.validate_json(content)
        document.graph.check()
        path = path.with_suffix(".safetensors")
        with open_regular(path) as file:
            stored = file.read()
        if hashlib.sha256(stored).hexdigest() != document.values:
            raise ValueError("it is not the one that was written")
        return Captured(document.graph, safetensors.load(stored))
    except OSError as error:
        notify(f"ignored {path}: {error.strerror}")
    except (ValueError, SafetensorError) as error:
        first = next(iter(str(error).splitlines()), "")
        notify(f"ignored {path}: it is damaged ({type(error).__name__}: {first})")
    return None


def save(key: str, captured: Captured, folder: Path | None = None, notify: Notify = to_stderr) -> None:
    """Cache a captured model. If the folder cannot be written, a notice says so, and it is captured again next time."""
    from safetensors import torch as safetensors

    where = folder or cache_folder()
    values = safetensors.save({name: value.contiguous() for name, value in captured.values.items()})
    document = CapturedDocument(captured.graph, hashlib.sha256(values).hexdigest())
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_whole(where / f"{key}.safetensors", values)
        write_whole(where / f"{key}.json", DOCUMENTS.dump_json(document))
    except OSError as error:
        notify(f"the captured model is not cached: {where}: {error.strerror}")
