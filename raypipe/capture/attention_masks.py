"""Give attention no mask, or ``is_causal``, where its mask says no more than that; then fused kernels apply.

Models of the transformers library build a mask tensor whenever they are traced, for no value may decide otherwise. On
GPUs, ``scaled_dot_product_attention`` with a mask can't use FlashAttention, and every stage would make the mask again.

A mask is replaced only where this is provably the same. It must be positional (``graph/positions.py``), and vary
along queries and keys alone. Then its values at the captured lengths, which are computed and compared, decide those for
any batch and for all shorter lengths; ``OperationGraph.at_most`` keeps longer ones away. An additive mask must be
exactly 0 where it shows, and -inf or the dtype's lowest value where it hides: in a causal row that always shows its own
position, both give a weight of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from raypipe.capture.captured import Captured, Notify
from raypipe.capture.stage_module import compute, decoded, resolve
from raypipe.graph.dims import Dim, Sizes, evaluate, evaluate_all, symbols
from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import Operation, OperationGraph, Plain, needed, selected
from raypipe.graph.positions import CONSTANT, Dims, varying_dims

LONGEST = 16_384
"""Longest sequence for which a mask is computed: 256 MiB for each of its steps."""
Kind = Literal["causal", "absent", "other"]


def replace_masks(captured: Captured, notify: Notify) -> Captured:
    """Return the model without the masks that are causal or show everything, and without what computed them.

    Args:
        captured: the model.
        notify: called with a sentence if a mask is too large to be computed here, and stays.
    """
    graph = captured.graph
    operations, varying = list(graph.operations), varying_dims(graph)
    kinds: dict[int, Kind] = {}
    at_most: dict[str, int] = dict(graph.at_most)
    for number, operation in enumerate(graph.operations):
        if (mask := operation.mask) is None:
            continue
        if mask not in kinds:
            kinds[mask] = _kind(captured, mask, varying[mask], notify)
        kind = graph.operations[mask].type
        lengths = (_length(graph, operation.args[0]), _length(graph, operation.args[1]))
        if kind is None or kinds[mask] == "other" or (kinds[mask] == "causal" and lengths != kind.shape[-2:]):
            continue
        operations[number] = operation.without_mask(kinds[mask] == "causal")
        at_most |= {s: graph.example[s] for dim in kind.shape[-2:] for s in symbols(dim) if s in graph.example}
    plain = replace(graph, operations=tuple(operations), at_most=at_most)
    plain = selected(plain, sorted(needed(plain)))
    return Captured(plain, {name: value for name, value in captured.values.items() if name in plain.sources})


def _length(graph: OperationGraph, given: Plain) -> Dim | None:
    """Return the number of queries or keys that an operand of attention has."""
    kind = graph.type_of(given.get("op", given.get("of")))
    return None if kind is None else kind.shape[-2]


# ---- what a mask says


def _kind(captured: Captured, mask: int, varying: Dims | None, notify: Notify) -> Kind:
    graph = captured.graph
    operation = graph.operations[mask]
    if operation.type is None or len(operation.type.shape) < 2 or varying is None:
        return "other"
    rank = len(operation.type.shape)
    if not varying <= {rank - 2, rank - 1}:
        return "other"
    inner = {s for dim in operation.type.shape[-2:] for s in symbols(dim)}
    sizes = {name: value if name in inner else 1 for name, value in graph.example.items()}
    longest = max(evaluate_all(operation.type.shape[-2:], sizes))
    if longest > LONGEST:
        notify(f"attention keeps its mask {operation.name}, for at length {longest} it is not compared with others")
        return "other"
    value = computed(captured, mask, sizes)
    if value is None:
        return "other"
    hidden = _hidden(value.reshape(-1, *value.shape[-2:])[0])
    if hidden is None:
        return "other"
    if not bool(hidden.any()):
        return "absent"
    square = operation.type.shape[-2] == operation.type.shape[-1]
    return "causal" if square and torch.equal(hidden, torch.ones_like(hidden).triu(1)) else "other"


def _hidden(mask: Tensor) -> Tensor | None:
    """Return which keys a mask hides; None for one that changes the weights in another way."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.dtype.is_floating_point:
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return hidden if bool((hidden | (mask == 0)).all()) else None


def computed(captured: Captured, wanted: int, sizes: Sizes) -> Tensor | None:
    """Compute a positional result; None if it looks something up by a negative index."""
    graph = captured.graph

    def given(operand: int | str) -> Any:
        operation = graph.operations[operand] if isinstance(operand, int) else None
        if operation is None:
            constant = captured.values.get(str(operand))
            return any_of(operand) if constant is None else constant
        if short_name(operation.target) == "sym_size":
            kind = graph.type_of(operation.operands[0])
            assert kind is not None, "only tensors have sizes"
            return evaluate(kind.shape[operation.args[1]], sizes)
        if short_name(operation.target) in CONSTANT:
            args, kwargs = decoded(operation, {o: any_of(o) for o in operation.operands}, "cpu")
            return resolve(operation.target)(*args, **kwargs)
        return None

    def any_of(operand: int | str) -> Any:
        """Return a size, or for a tensor of which only the shape is read, any one of that shape."""
        kind = graph.type_of(operand)
        if kind is None:
            return compute(graph, int(operand), given)
        return torch.zeros((), dtype=getattr(torch, kind.dtype)).expand(evaluate_all(kind.shape, sizes))

    def allowed(operation: Operation, args: Sequence[Any]) -> bool:
        return short_name(operation.target) != "index" or not any(bool((place < 0).any()) for place in args[1])

    result: Tensor | None = compute(graph, wanted, given, allowed)
    return result
