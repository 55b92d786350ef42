"""Capture a model once, and read the result from the cache afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as safetensors

from raypipe.capture.captured import Captured
from raypipe.graph.captured_files import Notify, load_operations, load_values, save, to_stderr


def captured_once(
    key: str, capture: Callable[[], Captured], folder: Path | None = None, notify: Notify = to_stderr
) -> Captured:
    """Return the captured model that is cached under ``key``, or call ``capture`` and cache its result."""
    kept = load_kept(key, folder, notify)
    if kept is not None:
        return kept
    captured = capture()
    values = {name: value.contiguous() for name, value in captured.values.items()}
    save(key, captured.graph, captured.calls, safetensors.save(values), folder, notify)
    return captured


def load_kept(key: str, folder: Path | None = None, notify: Notify = to_stderr) -> Captured | None:
    """Read a captured model from the cache; None if it is missing or damaged."""
    found = load_operations(key, folder, notify)
    content = None if found is None else load_values(key, found[2], folder, notify)
    if found is None or content is None:
        return None
    graph, calls, _ = found
    try:
        values = safetensors.load(content)
    except SafetensorError as error:
        notify(f"ignored {key}.safetensors: {error}")
        return None
    return Captured(graph, calls, values)
