"""Prove that a model can run in slices of a sequence: that positions meet in causal attention alone.

Every result has at most one dimension along which the sequence lies, found from the symbol of its length in the shape.
An operation is *row-wise* if its result at a position is computed from its operands at that position, and does not
depend on the length. If all operations are row-wise, or causal attention, or number the positions, then a slice
computes what the whole does at its positions, once attention sees the keys and values before and positions count from
where the slice begins. Anything else is refused with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from raypipe.errors import CaptureError
from raypipe.graph.calls import ATTENTION, Call, Plain, is_causal, mask_of
from raypipe.graph.dims import Sizes, evaluate, evaluate_all, symbols
from raypipe.graph.flops import short_name
from raypipe.graph.operations import Operation, OperationGraph, TensorType
from raypipe.graph.values.positions import CONSTANT, POINTWISE, is_size

Flow = dict[str, int | None]
"""Per operation, the dimension of its result along which the sequence lies; None: it has none."""
_POINTWISE = POINTWISE | {
    "pow",
    "tanh",
    "gelu",
    "silu",
    "relu",
    "sigmoid",
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "square",
    "erf",
    "softplus",
    "reciprocal",
    "leaky_relu",
    "hardtanh",
    "dropout",
}
_MOVES = {"transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "split"}
_MOVES |= {"split_with_sizes", "chunk", "unbind", "getitem", "slice", "select", "cat", "stack"}
"""Operations that move values without changing any; along a sequence that stays as long as it is, they move none."""
_RESHAPES = {"reshape", "view", "flatten", "unflatten"}
_REDUCTIONS = {"mean": 1, "sum": 1, "amax": 1, "var": 1, "softmax": 1, "_softmax": 1, "log_softmax": 1}
"""Operations over some dimensions -> the place of these among the arguments."""
_PRODUCTS = {"linear", "addmm", "mm", "matmul"}


def sequence_flow(graph: OperationGraph, calls: Sequence[Call]) -> Flow:
    """Return along which dimension of each result the sequence lies.

    Args:
        graph: the model; each of its raw inputs is ``[samples, sequence]``.
        calls: the arguments of its operations.

    Raises:
        CaptureError: a slice would not compute what the whole does; it names the operation.
    """
    return _FlowReader(graph, calls).flow()


class _FlowReader:
    def __init__(self, graph: OperationGraph, calls: Sequence[Call]) -> None:
        self.graph, self.calls = graph, calls
        shapes = [graph.sources[name].type.shape for name in graph.inputs]
        lengths = {shape[1] if len(shape) == 2 else None for shape in shapes}
        self.length = lengths.pop() if len(lengths) == 1 else None
        if not isinstance(self.length, str) or symbols(self.length) != {self.length}:
            raise _refused("the model's inputs", "they are not all [samples, sequence], with a length that may vary")
        # Any sizes that no product of others equals.
        self.sizes: Sizes = {**{name: 2 * n + 1009 for n, name in enumerate(sorted(graph.example))}, self.length: 101}

    def flow(self) -> Flow:
        found: Flow = {}
        for operation, call in zip(self.graph.operations, self.calls, strict=True):
            if is_size(operation):
                continue
            name = short_name(operation.target)
            where = operation.name + (f" ({operation.module})" if operation.module else "")
            kind = operation.type
            along = None if kind is None else self.along(kind, where)
            why = self.refusal(name, operation, call, along, where)
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

    def refusal(self, name: str, operation: Operation, call: Call, along: int | None, where: str) -> str | None:
        """Why the operation is not row-wise; None if it is."""
        values = [*call.args, *call.kwargs.values()]
        operands = [kind for value in values for kind in self.kinds(value)]
        if operation.mutates:
            return "it writes its operands"
        if operation.target == ATTENTION:
            return self.attention(call, operands)
        places = [self.along(kind, where) for kind in operands]
        if not any(place is not None for place in places) and name not in ("arange", *CONSTANT):
            return None if along is None or name == "expand" else "it makes a sequence of its own"
        if operation.random:
            straight = along is not None and operation.type is not None and operation.type.shape[along] == self.length
            if name != "dropout" or not straight:
                return "it draws random numbers other than dropout's along the sequence"
        if name == "arange":
            starts = len(call.args) == 1 or (len(call.args) == 2 and call.args[0] == 0)
            return None if starts and along == 0 else "it numbers something else than the positions"
        if name in CONSTANT:
            return (
                None
                if all(isinstance(v, list) or not self.sized(v) for v in values[:2])
                else "it is filled with a size"
            )
        if name in _POINTWISE:
            if any(self.sized(v) for v in values if not isinstance(v, list)):
                return "it computes with the length of the sequence"
            assert operation.type is not None
            rank = len(operation.type.shape)
            aligned = {p + rank - len(k.shape) for k, p in zip(operands, places, strict=True) if p is not None}
            return None if aligned == {along} else "its operands' positions do not lie side by side"
        if name in _MOVES:
            kept = operation.type is None or (along is not None and operation.type.shape[along] == self.length)
            whole = all(k.shape[p] == self.length for k, p in zip(operands, places, strict=True) if p is not None)
            return None if kept and whole else "it takes or joins parts of the sequence"
        if name in _RESHAPES:
            assert operation.type is not None
            same = along is not None and self.stride(operands[0], places[0]) == self.stride(operation.type, along)
            return None if same else "it folds the sequence into another dimension"
        if name == "embedding":
            return None if places[0] is None and along is not None else "its table depends on the sequence"
        if name in _PRODUCTS:
            at = 1 if name == "addmm" else 0
            others = [p for n, p in enumerate(places) if n != at]
            row = places[at] is not None and places[at] != len(operands[at].shape) - 1
            return None if row and others == [None] * len(others) else "it multiplies positions by one another"
        if name in ("layer_norm", "rms_norm"):
            dims, rank = call.args[1], len(operands[0].shape)
            over = len(dims) if isinstance(dims, list) else rank
            return None if places[0] is not None and places[0] < rank - over else "it normalises over positions"
        if name in _REDUCTIONS:
            dims = call.args[_REDUCTIONS[name]] if len(call.args) > 1 else None
            reduced = [dims] if isinstance(dims, int) else dims
            rank = len(operands[0].shape)
            apart = isinstance(reduced, list) and places[0] not in {int(d) % rank for d in reduced}
            return None if apart and along is not None else "it reduces over positions"
        return "it is not known to compute each position by itself"

    def attention(self, call: Call, operands: list[TensorType]) -> str | None:
        if mask_of(call) is not None or not is_causal(call):
            return "its attention is not causal, or has a mask of values"
        rows = all(len(k.shape) == 4 and k.shape[2] == self.length for k in operands)
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
            call = self.calls[value["op"]]
            return [kind for one in call.args for kind in self.kinds(one)][:1]
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
