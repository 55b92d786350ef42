"""What a capture returns: it is read from a cache by processes that never capture anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from raypipe.graph.calls import Call
from raypipe.graph.operations import OperationGraph

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
