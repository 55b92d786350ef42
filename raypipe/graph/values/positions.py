"""Prove that a tensor depends on nothing but positions, so that its values at one size show those at any smaller size.

A *positional* result is computed from ranges that begin at 0 and from numbers, by operations whose value at a position
does not depend on the sizes of their operands. Then the result for small sizes is the leading corner of the result for
large ones, and it is constant along every dimension in which no range enters. Attention masks are made in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raypipe.graph.calls import Call, Plain
from raypipe.graph.dims import symbols
from raypipe.graph.flops import short_name
from raypipe.graph.operations import Operation, OperationGraph, TensorType

Dims = frozenset[int]
"""Dimensions of a result along which its values may differ."""
POINTWISE = (
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "remainder", "floor_divide", "minimum", "maximum"}
    | {"clamp", "le", "lt", "ge", "gt", "eq", "ne", "__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or"}
    | {"bitwise_not", "bitwise_xor", "logical_and", "logical_or", "logical_not", "logical_xor", "where"}
    | {"masked_fill", "to", "_to_copy", "type_as", "clone", "contiguous", "alias", "detach", "expand"}
)
"""Operations whose value at a position is computed from their operands' values at that position."""
CONSTANT = {"ones", "zeros", "full", "new_ones", "new_zeros", "new_full"}
CONSTANT |= {"ones_like", "zeros_like", "full_like", "scalar_tensor"}
"""Operations that read no more than the shape of an operand."""
_RESHAPES = {"unsqueeze", "squeeze", "reshape", "view"}
_SIZES = {"operator", "torch", "math"}
"""Libraries of the functions that compute with sizes."""


def is_size(operation: Operation) -> bool:
    """Return whether an operation computes with sizes of tensors."""
    return operation.type is None and (
        operation.target.split(".")[0] in _SIZES or short_name(operation.target) == "sym_size"
    )


def varying_dims(graph: OperationGraph, calls: Sequence[Call]) -> list[Dims | None]:
    """Return, per operation, the dimensions along which its result may vary; None unless it is positional.

    ``index`` counts as positional although a negative index would count from the end; whoever evaluates it must check
    that there is none.
    """
    found: list[Dims | None] = []
    for operation, call in zip(graph.operations, calls, strict=True):
        rule = _rule(short_name(operation.target))
        if rule is None or operation.random or operation.mutates or operation.type is None:
            found.append(None)
            continue
        dims = rule(_CallReader(graph, found), operation.type, call)
        if any(symbols(size) - graph.example.keys() for size in operation.type.shape):
            found.append(None)  # it depends on values
            continue
        fixed = {d for d, size in enumerate(operation.type.shape) if size == 1}
        found.append(None if dims is None else dims - fixed)
    return found


class _CallReader:
    """Reads the values that are known of a call's operands."""

    def __init__(self, graph: OperationGraph, found: Sequence[Dims | None]) -> None:
        self.graph, self.found = graph, found

    def type(self, value: Plain) -> TensorType | None:
        """Return the type of an operand; None for anything but a tensor."""
        if not isinstance(value, dict) or not value.keys() & {"op", "of"}:
            return None
        if "op" in value:
            return self.graph.operations[value["op"]].type
        return self.graph.sources[value["of"]].type

    def dims(self, value: Plain) -> Dims | None:
        """Return the dimensions along which an operand varies; None unless it is positional."""
        kind = self.type(value)
        if kind is None:
            return None
        if "op" in value:
            return self.found[int(value["op"])]
        constant = self.graph.sources[value["of"]].kind == "constant"  # a buffer's value may come from a checkpoint
        return frozenset(range(len(kind.shape))) if constant else None


_Rule = Callable[[_CallReader, TensorType, Call], Dims | None]


def _rule(name: str) -> _Rule | None:
    if name in POINTWISE:
        return _pointwise
    if name in CONSTANT:
        return _constant
    return _reshape if name in _RESHAPES else _RULES.get(name)


def _literal(value: Plain) -> bool:
    """Return whether an argument is given in the call, and not computed."""
    return not isinstance(value, dict) or not value.keys() & {"op", "of"}


def _pointwise(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    found: set[int] = set()
    for value in [*call.args, *call.kwargs.values()]:
        if isinstance(value, list) or _literal(value):  # a list holds sizes, of which only the result's shape is made
            continue
        dims, kind = reader.dims(value), reader.type(value)
        if dims is None or kind is None:
            return None
        found |= {d + len(result.shape) - len(kind.shape) for d in dims}
    return frozenset(found)


def _constant(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    values = [*call.args, *call.kwargs.values()]
    sizes = [v for v in values if not isinstance(v, list) and not _literal(v) and reader.type(v) is None]
    return None if sizes else frozenset()  # a size as the value to fill with


def _range(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    begins = call.args[0] if len(call.args) > 1 else 0
    step = call.args[2] if len(call.args) > 2 else 1
    return frozenset({0}) if _literal(begins) and _literal(step) else None


def _slice(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    begin, step = _argument(call, 2, 0), _argument(call, 4, 1)
    if not (_literal(begin) and _literal(step)) or (begin or 0) < 0:
        return None
    return reader.dims(call.args[0])


def _select(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    dims, kind, (at, index) = reader.dims(call.args[0]), reader.type(call.args[0]), call.args[1:3]
    if dims is None or kind is None or not _literal(index) or index < 0:
        return None
    at %= len(kind.shape)
    return frozenset(d - (d > at) for d in dims if d != at)


def _reshape(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    """Only dimensions of size 1 may come or go."""
    dims, kind = reader.dims(call.args[0]), reader.type(call.args[0])
    if dims is None or kind is None:
        return None
    before, after = ([d for d, size in enumerate(t.shape) if size != 1] for t in (kind, result))
    if [kind.shape[d] for d in before] != [result.shape[d] for d in after]:
        return None
    moved = dict(zip(before, after, strict=True))
    return frozenset(moved[d] for d in dims)


def _scan(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    """A sum over all positions before, or a difference to the one before."""
    dims = reader.dims(call.args[0])
    return None if dims is None else dims | {int(call.args[1]) % len(result.shape)}


def _diff(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    dims, at = reader.dims(call.args[0]), _argument(call, 2, -1) % len(result.shape)
    before = _argument(call, 3, None)
    if before is not None:
        kind, more = reader.type(before), reader.dims(before)
        dims = None if dims is None or more is None else dims | more
        if kind is None or not isinstance(kind.shape[at], int):
            return None
    return None if dims is None or _argument(call, 4, None) is not None else dims | {at}


def _triangle(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    dims, rank = reader.dims(call.args[0]), len(result.shape)
    return None if dims is None or not _literal(_argument(call, 1, 0)) else dims | {rank - 2, rank - 1}


def _index(reader: _CallReader, result: TensorType, call: Call) -> Dims | None:
    """Look up by tensors of integers in the first dimensions: their common shape replaces these."""
    whole, places = call.args
    dims = reader.dims(whole)
    kinds = [reader.type(place) for place in places]
    if dims is None or any(kind is None or not kind.dtype.startswith("int") for kind in kinds):
        return None
    ranks = [len(kind.shape) for kind in kinds if kind is not None]
    found = {d - len(places) + max(ranks) for d in dims if d >= len(places)}
    for d, (place, rank) in enumerate(zip(places, ranks, strict=True)):
        varies = reader.dims(place)
        if varies is None:
            return None
        if d in dims:
            found |= {v + max(ranks) - rank for v in varies}
    return frozenset(found)


def _argument(call: Call, place: int, default: Any) -> Any:
    return call.args[place] if len(call.args) > place else default


_RULES: dict[str, _Rule] = {
    "arange": _range,
    "slice": _slice,
    "select": _select,
    "cumsum": _scan,
    "diff": _diff,
    "tril": _triangle,
    "triu": _triangle,
    "index": _index,
}
