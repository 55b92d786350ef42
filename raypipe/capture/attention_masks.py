"""Give attention no mask, or ``is_causal``, where its mask says no more than that; then fused kernels apply.

Models of the transformers library build a mask tensor whenever they are traced, for no value may decide otherwise. On
GPUs, ``scaled_dot_product_attention`` with a mask can't use FlashAttention, and every stage would make the mask again.

A mask is replaced only where this is provably the same. It must be positional (``graph/values/positions.py``), and vary
along queries and keys alone. Then its values at the captured lengths, which are computed and compared, decide those for
any batch and for all shorter lengths; ``OperationGraph.at_most`` keeps longer ones away. An additive mask must be
exactly 0 where it shows, and -inf or the dtype's lowest value where it hides: in a causal row that always shows its own
position, both give a weight of exactly 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from raypipe.capture.decode import decode, resolve
from raypipe.capture.encode import Encoded
from raypipe.graph.calls import ATTENTION, Call, Plain, is_causal, mask_of, without_mask
from raypipe.graph.captured_files import Notify
from raypipe.graph.dims import Dim, Sizes, evaluate, evaluate_all, symbols
from raypipe.graph.flops import short_name
from raypipe.graph.operations import OperationGraph, TensorType, needed, selected
from raypipe.graph.values.positions import CONSTANT, Dims, is_size, varying_dims

LONGEST = 16_384
"""Longest sequence for which a mask is computed: 256 MiB for each of its steps."""
Kind = Literal["causal", "absent", "other"]


def replace_masks(encoded: Encoded, constants: Mapping[str, Tensor], notify: Notify) -> Encoded:
    """Return the model without the masks that are causal or show everything, and without what computed them.

    Args:
        encoded: the model.
        constants: its constant tensors.
        notify: called with a sentence if a mask is too large to be computed here, and stays.
    """
    graph, calls = encoded.graph, list(encoded.calls)
    varying = varying_dims(graph, calls)
    kinds: dict[int, Kind] = {}
    at_most: dict[str, int] = {}
    for number, operation in enumerate(graph.operations):
        mask = mask_of(calls[number]) if operation.target == ATTENTION else None
        if mask is None:
            continue
        if mask not in kinds:
            kinds[mask] = _kind(encoded, constants, mask, varying[mask], notify)
        kind = graph.operations[mask].type
        lengths = (_length(graph, calls[number], 0), _length(graph, calls[number], 1))
        if kind is None or kinds[mask] == "other" or (kinds[mask] == "causal" and lengths != kind.shape[-2:]):
            continue
        calls[number] = without_mask(calls[number], kinds[mask] == "causal")
        at_most |= {s: graph.example[s] for dim in kind.shape[-2:] for s in symbols(dim) if s in graph.example}
    if calls == list(encoded.calls):
        return encoded
    return _pruned(graph, calls, at_most)


def _length(graph: OperationGraph, call: Call, operand: int) -> Dim | None:
    """Return the number of queries (operand 0) or keys (1)."""
    given: Plain = call.args[operand]
    kind = graph.operations[given["op"]].type if "op" in given else graph.sources[given["of"]].type
    return None if kind is None else kind.shape[-2]


def _pruned(graph: OperationGraph, calls: list[Call], at_most: Mapping[str, int]) -> Encoded:
    operations = [
        replace(operation, operands=call.operands(), causal=operation.target == ATTENTION and is_causal(call))
        for operation, call in zip(graph.operations, calls, strict=True)
    ]
    order = sorted(needed(operations, graph.outputs.values()))
    kept, written, new = selected(operations, calls, order)
    read = {name for operation in kept for name in operation.sources}
    sources = {n: s for n, s in graph.sources.items() if n in read or s.kind in ("parameter", "input")}
    outputs = {name: new[number] for name, number in graph.outputs.items()}
    smaller = replace(graph, operations=kept, sources=sources, outputs=outputs, at_most={**graph.at_most, **at_most})
    return Encoded(smaller, written)


# ---- what a mask says


def _kind(encoded: Encoded, constants: Mapping[str, Tensor], mask: int, varying: Dims | None, notify: Notify) -> Kind:
    graph = encoded.graph
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
    value = computed(encoded, constants, mask, sizes)
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


def computed(encoded: Encoded, constants: Mapping[str, Tensor], wanted: int, sizes: Sizes) -> Tensor | None:
    """Compute a positional result; None if it looks something up by a negative index."""
    graph, calls = encoded.graph, encoded.calls
    order: list[int] = []
    todo = [wanted]
    while todo:
        number = todo.pop()
        operation = graph.operations[number]
        if number not in order and not is_size(operation):
            order.append(number)
            todo.extend([] if short_name(operation.target) in CONSTANT else operation.inputs)
    order.sort()
    last = {operand: number for number in order for operand in graph.operations[number].operands}
    found: dict[int | str, Any] = {}
    with torch.no_grad(), torch.device("cpu"):
        for number in order:
            name, operation, call = short_name(graph.operations[number].target), graph.operations[number], calls[number]
            for operand in operation.operands:
                if operand not in found:
                    constant = constants.get(operand) if isinstance(operand, str) else None
                    found[operand] = _given(encoded, operand, sizes) if constant is None else constant
            args = [decode(arg, found, "cpu") for arg in call.args]
            if name == "index" and any(bool((place < 0).any()) for place in args[1]):
                return None
            kwargs = {key: decode(arg, found, "cpu") for key, arg in call.kwargs.items()}
            found[number] = resolve(operation.target)(*args, **kwargs)
            for operand in set(operation.operands):
                if last[operand] == number:
                    del found[operand]
    result: Tensor = found[wanted]
    return result


def _given(encoded: Encoded, operand: int | str, sizes: Sizes) -> Any:
    """Return a size, or for a tensor of which only the shape is read, any one of that shape."""
    graph = encoded.graph
    kind = graph.operations[operand].type if isinstance(operand, int) else graph.sources[operand].type
    if kind is not None:
        return _any(kind, sizes)
    assert isinstance(operand, int)
    operation, call = graph.operations[operand], encoded.calls[operand]
    if short_name(operation.target) == "sym_size":
        (of,), dim = operation.operands, call.args[1]
        read = graph.operations[of].type if isinstance(of, int) else graph.sources[of].type
        assert read is not None, "only tensors have sizes"
        return evaluate(read.shape[dim], sizes)
    inner = {o: _given(encoded, o, sizes) for o in operation.operands}
    return resolve(operation.target)(*(decode(arg, inner, "cpu") for arg in call.args))


def _any(kind: TensorType, sizes: Sizes) -> Tensor:
    return torch.zeros((), dtype=getattr(torch, kind.dtype)).expand(evaluate_all(kind.shape, sizes))
