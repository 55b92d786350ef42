"""Keep some operations of a model, and number them anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from raypipe.graph.calls import Call
from raypipe.graph.operations import Operation


def needed(operations: Sequence[Operation], outputs: Iterable[int]) -> set[int]:
    """Return the operations that outputs and writes to buffers need, directly or indirectly."""
    keep: set[int] = set()
    todo = [*outputs, *(n for n, o in enumerate(operations) if o.mutates)]
    while todo:
        number = todo.pop()
        if number not in keep:
            keep.add(number)
            todo.extend(operations[number].inputs)
    return keep


def selected(
    operations: Sequence[Operation], calls: Sequence[Call], order: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[Call, ...], dict[int, int]]:
    """Return operations and calls in this order with their new numbers, and these by the old ones."""
    new = {old: position for position, old in enumerate(order)}
    kept = tuple(
        replace(operations[n], operands=tuple(new[o] if isinstance(o, int) else o for o in operations[n].operands))
        for n in order
    )
    return kept, tuple(calls[n].renumbered(new) for n in order), new
