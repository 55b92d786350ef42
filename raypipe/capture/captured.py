"""A captured model as data, and the cache from which processes that never capture anything read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from raypipe.graph.calls import Call
from raypipe.graph.captured_files import Notify, load_operations, load_values, save, to_stderr
from raypipe.graph.operations import OperationGraph, selected

ROWS = 3
"""Rows of the data on which a whole model is tried, where it cannot be captured."""


@dataclass(frozen=True)
class Captured:
    """A model's forward as data, from which any consecutive operations can be built as a module."""

    graph: OperationGraph
    calls: tuple[Call, ...]
    """Per operation, its arguments as plain data."""
    values: Mapping[str, Tensor]
    """Initial values of the buffers and constants that the operations read."""


def reordered(captured: Captured, order: Sequence[int]) -> Captured:
    """Return a captured model whose operation ``i`` is the former ``order[i]``; it can run in that order."""
    graph = captured.graph
    operations, calls, new = selected(graph.operations, captured.calls, order)
    outputs = {name: new[number] for name, number in graph.outputs.items()}
    return Captured(replace(graph, operations=operations, outputs=outputs), calls, captured.values)


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
