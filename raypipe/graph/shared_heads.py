"""Attention whose queries share heads of keys and values, without the operations that copy these for each of them.

With a mask, transformers copies keys and values for each head of queries that shares them. Without one, kernels read
shared ones as they are, which also makes less to keep for the backward, and less to gather over copies.
"""

from __future__ import annotations

from dataclasses import replace

from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import Operation, OperationGraph, TensorType


def sharing_heads(graph: OperationGraph, attention: Operation) -> Operation:
    """Return the same attention of keys and values that no operation has copied for the heads that share them."""
    query, *pair = attention.args[:3]
    alone = [_before_copies(graph, one.get("op")) for one in pair]
    if None in alone:
        return attention
    args = (query, *({"op": number} for number in alone), *attention.args[3:])
    return replace(attention, args=args, kwargs={**attention.kwargs, "enable_gqa": True})


def _before_copies(graph: OperationGraph, number: int | None) -> int | None:
    """Return the ``[batch, heads, positions, width]`` of which an operation's result has every head several times.

    None if it is not made by expanding a new third dimension and joining that to the heads.
    """

    def read_by(number: int) -> int | None:
        return next(iter(graph.operations[number].inputs), None)

    kinds: list[TensorType | None] = []
    for names in ({"reshape", "view", "_unsafe_view"}, {"expand"}, {"unsqueeze"}):
        while number is not None and short_name(graph.operations[number].target) in ("slice", "clone", "contiguous"):
            before = read_by(number)  # [:, :, None, :, :] has slices of all there is
            if before is None or graph.operations[before].type != graph.operations[number].type:
                return None
            number = before
        if number is None or short_name(graph.operations[number].target) not in names:
            return None
        kinds.append(graph.operations[number].type)
        number = read_by(number)
    shapes = [kind.shape for kind in (*kinds, None if number is None else graph.type_of(number)) if kind is not None]
    if len(shapes) < 4 or len(shapes[1]) != 5 or len(shapes[3]) != 4:
        return None
    (batch, heads, *rest), copies = shapes[3], shapes[1][2]
    if not (isinstance(heads, int) and isinstance(copies, int)):
        return None
    wanted = [(batch, heads * copies, *rest), (batch, heads, copies, *rest), (batch, heads, 1, *rest)]
    return number if [*shapes[:3]] == wanted else None
