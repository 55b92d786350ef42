"""The same captured model with its operations in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from raypipe.capture.captured import Captured


def reordered(captured: Captured, order: Sequence[int]) -> Captured:
    """Return a captured model whose operation ``i`` is the former ``order[i]``; it can run in that order."""
    graph = captured.graph
    new = {old: i for i, old in enumerate(order)}
    operations = tuple(
        replace(operation, operands=tuple(new[o] if isinstance(o, int) else o for o in operation.operands))
        for operation in (graph.operations[old] for old in order)
    )
    outputs = {name: new[number] for name, number in graph.outputs.items()}
    calls = tuple(captured.calls[old].renumbered(new) for old in order)
    return Captured(replace(graph, operations=operations, outputs=outputs), calls, captured.values)
