"""Prove what follows from positions: values that show those at any smaller size, and models that run in slices.

A *positional* result is computed from ranges that begin at 0 and from numbers, by operations whose value at a position
does not depend on the sizes of their operands. Then the result for small sizes is the leading corner of the result for
large ones, and it is constant along every dimension in which no range enters. Attention masks are made in this way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod

from raypipe.errors import CaptureError
from raypipe.graph.dims import Sizes, evaluate, evaluate_all, symbols
from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import ATTENTION, Operation, OperationGraph, Plain, TensorType

LONGEST = 16_384
"""Longest sequence for which a mask is computed and compared: 256 MiB for each of its steps."""
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


def varying_dims(graph: OperationGraph) -> list[Dims | None]:
    """Return, per operation, the dimensions along which its result may vary; None unless it is positional.

    ``index`` counts as positional although a negative index would count from the end; whoever evaluates it must check
    that there is none.
    """
    found: list[Dims | None] = []
    for operation in graph.operations:
        rule = _rule(short_name(operation.target))
        if rule is None or operation.random or operation.mutates or operation.type is None:
            found.append(None)
            continue
        dims = rule(_CallReader(graph, found), operation.type, operation)
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
        return None if _literal(value) else self.graph.type_of(value.get("op", value.get("of")))

    def dims(self, value: Plain) -> Dims | None:
        """Return the dimensions along which an operand varies; None unless it is positional."""
        kind = self.type(value)
        if kind is None:
            return None
        if "op" in value:
            return self.found[int(value["op"])]
        constant = self.graph.sources[value["of"]].kind == "constant"  # a buffer's value may come from a checkpoint
        return frozenset(range(len(kind.shape))) if constant else None


_Rule = Callable[[_CallReader, TensorType, Operation], Dims | None]


def _rule(name: str) -> _Rule | None:
    if name in POINTWISE:
        return _pointwise
    if name in CONSTANT:
        return _constant
    return _reshape if name in _RESHAPES else _RULES.get(name)


def _literal(value: Plain) -> bool:
    """Return whether an argument is given in the call, and not computed."""
    return not isinstance(value, dict) or not value.keys() & {"op", "of"}


def _pointwise(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    found: set[int] = set()
    for value in [*call.args, *call.kwargs.values()]:
        if isinstance(value, list) or _literal(value):  # a list holds sizes, of which only the result's shape is made
            continue
        dims, kind = reader.dims(value), reader.type(value)
        if dims is None or kind is None:
            return None
        found |= {d + len(result.shape) - len(kind.shape) for d in dims}
    return frozenset(found)


def _constant(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    values = [*call.args, *call.kwargs.values()]
    sizes = [v for v in values if not isinstance(v, list) and not _literal(v) and reader.type(v) is None]
    return None if sizes else frozenset()  # a size as the value to fill with


def _range(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    begins = call.args[0] if len(call.args) > 1 else 0
    step = call.args[2] if len(call.args) > 2 else 1
    return frozenset({0}) if _literal(begins) and _literal(step) else None


def _slice(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    begin, step = call.argument(2, default=0), call.argument(4, default=1)
    if not (_literal(begin) and _literal(step)) or (begin or 0) < 0:
        return None
    return reader.dims(call.args[0])


def _select(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    dims, kind, (at, index) = reader.dims(call.args[0]), reader.type(call.args[0]), call.args[1:3]
    if dims is None or kind is None or not _literal(index) or index < 0:
        return None
    at %= len(kind.shape)
    return frozenset(d - (d > at) for d in dims if d != at)


def _reshape(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    """Only dimensions of size 1 may come or go."""
    dims, kind = reader.dims(call.args[0]), reader.type(call.args[0])
    if dims is None or kind is None:
        return None
    before, after = ([d for d, size in enumerate(t.shape) if size != 1] for t in (kind, result))
    if [kind.shape[d] for d in before] != [result.shape[d] for d in after]:
        return None
    moved = dict(zip(before, after, strict=True))
    return frozenset(moved[d] for d in dims)


def _scan(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    """A sum over all positions before, or a difference to the one before."""
    dims = reader.dims(call.args[0])
    return None if dims is None else dims | {int(call.args[1]) % len(result.shape)}


def _diff(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    dims, at = reader.dims(call.args[0]), call.argument(2, default=-1) % len(result.shape)
    before = call.argument(3, default=None)
    if before is not None:
        kind, more = reader.type(before), reader.dims(before)
        dims = None if dims is None or more is None else dims | more
        if kind is None or not isinstance(kind.shape[at], int):
            return None
    return None if dims is None or call.argument(4, default=None) is not None else dims | {at}


def _triangle(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
    dims, rank = reader.dims(call.args[0]), len(result.shape)
    return None if dims is None or not _literal(call.argument(1, default=0)) else dims | {rank - 2, rank - 1}


def _index(reader: _CallReader, result: TensorType, call: Operation) -> Dims | None:
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


# Prove that a model can run in slices of a sequence: that positions meet in causal attention alone.
#
# Every result has at most one dimension along which the sequence lies, found from its length's symbol in the shape. An
# operation is *row-wise* if its result at a position is computed from its operands at that position, and does not
# depend on the length. If all operations are row-wise, or causal attention, or number the positions, then a slice
# computes what the whole does at its positions, once attention sees the keys and values before and positions count from
# where the slice begins. Anything else is refused with its name.
Flow = dict[str, int | None]
"""Per operation, the dimension of its result along which the sequence lies; None: it has none."""
_ROW_WISE = POINTWISE | {"pow", "tanh", "gelu", "silu", "relu", "sigmoid", "exp", "log", "sqrt", "rsqrt", "sin", "cos"}
_ROW_WISE |= {"square", "erf", "softplus", "reciprocal", "leaky_relu", "hardtanh", "dropout", "polar"}
_ROW_WISE |= {"copy_to_group", "reduce_from_group"}  # of layers that tensor ranks divide
_MOVES = {"transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "split"}
_MOVES |= {"split_with_sizes", "chunk", "unbind", "getitem", "slice", "select", "cat", "stack", "repeat_interleave"}
_MOVES |= {"slice_scatter", "view_as_complex", "view_as_real", "gather_from_group"}
"""Operations that move values without changing any; along a sequence that stays as long as it is, they move none."""
_FOLDS = {"reshape", "view", "flatten", "unflatten"}
_REDUCTIONS = {"mean": 1, "sum": 1, "amax": 1, "var": 1, "softmax": 1, "_softmax": 1, "log_softmax": 1}
"""Operations over some dimensions -> the place of these among the arguments."""
_MADE = {*CONSTANT, "new_empty"}
"""Operations that read no more than sizes; what is in a new tensor without values is written before it is read."""
_CHOICES = {"topk", "gather", "scatter"}
"""Operations that choose values of a row by number, as routers to experts do."""
_PRODUCTS = {"linear", "addmm", "mm", "matmul"}
BY_POSITION = _ROW_WISE | _REDUCTIONS.keys() | {"layer_norm", "rms_norm"}
"""Operations that may compute each position by itself, and neither multiply matrices nor name sizes."""


def sequence_flow(graph: OperationGraph) -> Flow:
    """Return along which dimension of each result the sequence lies; raw inputs are ``[samples, sequence]``.

    Raises:
        CaptureError: a slice would not compute what the whole does; it names the operation.
    """
    return FlowReader(graph).flow()


class FlowReader:
    """Tells which operations compute each position by itself.

    Raises:
        CaptureError: the inputs are not all ``[samples, sequence]``.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        shapes = [graph.sources[name].type.shape for name in graph.inputs]
        lengths = {shape[1] if len(shape) == 2 else None for shape in shapes}
        self.length = lengths.pop() if len(lengths) == 1 else None
        if not isinstance(self.length, str) or symbols(self.length) != {self.length}:
            raise _refused("the model's inputs", "they are not all [samples, sequence], with a length that may vary")
        # Any sizes that no product of others equals.
        self.sizes: Sizes = {**{name: 2 * n + 1009 for n, name in enumerate(sorted(graph.example))}, self.length: 101}

    def flow(self) -> Flow:
        """See ``sequence_flow``."""
        found: Flow = {}
        for operation in self.graph.operations:
            if is_size(operation):
                continue
            name = short_name(operation.target)
            where = operation.name + (f" ({operation.module})" if operation.module else "")
            kind = operation.type
            along = None if kind is None else self.along(kind, where)
            why = self.refusal(name, operation, along, where)
            if why is not None:
                raise _refused(f"operation {where}, {operation.target}", why)
            found[operation.name] = along
        return found

    def along(self, kind: TensorType, where: str) -> int | None:
        """The dimension that the sequence lies along, as it is or after the samples in one."""
        dims = [d for d, size in enumerate(kind.shape) if self.length in symbols(size)]
        if len(dims) > 1:
            raise _refused(f"operation {where}", "its result relates positions to one another")
        return dims[0] if dims else None

    def refusal(self, name: str, operation: Operation, along: int | None, where: str) -> str | None:
        """Say why the operation is not row-wise; None if it is."""
        values = [*operation.args, *operation.kwargs.values()]
        operands = [kind for value in values for kind in self.kinds(value)]
        if operation.mutates:
            return "it writes its operands"
        if operation.target == ATTENTION:
            return self.attention(operation, operands)
        places = [self.along(kind, where) for kind in operands]
        if not any(place is not None for place in places) and name not in ("arange", *_MADE):
            return None if along is None or name == "expand" else "it makes a sequence of its own"
        if operation.random:
            straight = along is not None and operation.type is not None and operation.type.shape[along] == self.length
            if name != "dropout" or not straight:
                return "it draws random numbers other than dropout's along the sequence"
        if name == "arange":
            starts = len(operation.args) == 1 or (len(operation.args) == 2 and operation.args[0] == 0)
            return None if starts and along == 0 else "it numbers something else than the positions"
        if name in _MADE:
            return (
                None
                if all(isinstance(v, list) or not self.sized(v) for v in values[:2])
                else "it is filled with a size"
            )
        if name in _ROW_WISE:
            if any(self.sized(v) for v in values if not isinstance(v, list)):
                return "it computes with the length of the sequence"
            assert operation.type is not None
            rank = len(operation.type.shape)
            aligned = {p + rank - len(k.shape) for k, p in zip(operands, places, strict=True) if p is not None}
            return None if aligned == {along} else "its operands' positions do not lie side by side"
        if name in _MOVES:
            sizes = {k.shape[p] for k, p in zip(operands, places, strict=True) if p is not None}
            if operation.type is not None:
                sizes.add(0 if along is None else operation.type.shape[along])
            return None if len(sizes) == 1 else "it takes or joins parts of the sequence"
        if name in _CHOICES:
            at = 2 if name == "topk" else 1
            apart = len(operands[0].shape) > 1 and int(operation.argument(at, "dim", -1)) % len(operands[0].shape)
            return None if apart and set(places) == {0} else "it chooses among positions"
        if operation.target == "raypipe.module.default" and json.loads(operation.args[1])["by_row"]:
            given = {self.along(kind, where) for kind in self.kinds(operation.args[2])}
            return None if given == {0} else "it is not given rows of positions"
        if name in _FOLDS:
            assert operation.type is not None
            same = along is not None and self.stride(operands[0], places[0]) == self.stride(operation.type, along)
            return None if same else "it folds the sequence into another dimension"
        if name == "rows_of_tensor_rank":  # which of the ids are in this rank's rows of a table
            return None
        if name == "embedding":
            return None if places[0] is None and along is not None else "its table depends on the sequence"
        if name in _PRODUCTS:
            at = 1 if name == "addmm" else 0
            others = [p for n, p in enumerate(places) if n != at]
            row = places[at] is not None and places[at] != len(operands[at].shape) - 1
            last = len(operands[-1].shape) - 1
            column = name in ("mm", "matmul") and places[at] is None and last > 0 and others == [last]
            alone = column or (row and others == [None] * len(others))
            return None if alone else "it multiplies positions by one another"
        if name in ("layer_norm", "rms_norm"):
            dims, rank = operation.args[1], len(operands[0].shape)
            over = len(dims) if isinstance(dims, list) else rank
            return None if places[0] is not None and places[0] < rank - over else "it normalises over positions"
        if name in _REDUCTIONS:
            dims = operation.args[_REDUCTIONS[name]] if len(operation.args) > 1 else None
            reduced = [dims] if isinstance(dims, int) else dims
            rank = len(operands[0].shape)
            apart = isinstance(reduced, list) and places[0] not in {int(d) % rank for d in reduced}
            return None if apart and along is not None else "it reduces over positions"
        return "it is not known to compute each position by itself"

    def attention(self, operation: Operation, operands: list[TensorType]) -> str | None:
        """The same of attention."""
        if operation.mask is not None or not operation.causal:
            return "its attention is not causal, or has a mask of values"
        rows = all(len(k.shape) == 4 and k.shape[2] == self.length for k in operands[:3])
        return None if rows else "its queries and keys are not [samples, heads, sequence, width]"

    def kinds(self, value: Plain) -> list[TensorType]:
        """The types of the tensors in an argument."""
        if isinstance(value, list):
            return [kind for one in value for kind in self.kinds(one)]
        if not isinstance(value, dict):
            return []
        if "of" in value:
            return [self.graph.sources[value["of"]].type]
        if "op" not in value:
            return []
        operation = self.graph.operations[value["op"]]
        if operation.type is None and not is_size(operation):  # several results, of one operation: those of its operand
            return [kind for one in operation.args for kind in self.kinds(one)][:1]
        return [] if operation.type is None else [operation.type]

    def sized(self, value: Plain) -> bool:
        """Return whether an argument is a size that is computed."""
        return isinstance(value, dict) and "op" in value and is_size(self.graph.operations[value["op"]])

    def stride(self, kind: TensorType, along: int | None) -> tuple[int, int]:
        """How far apart neighbouring positions are, and how many values there are in all."""
        if along is None:
            return 0, 0
        return prod(evaluate_all(kind.shape[along + 1 :], self.sizes)), prod(
            evaluate(d, self.sizes) for d in kind.shape
        )


def _refused(where: str, why: str) -> CaptureError:
    return CaptureError(where, f"{why}, so the model cannot run in slices of a sequence", "use parallel.slices: 1")
