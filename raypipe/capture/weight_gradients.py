"""Which weight gradients of a captured model can wait for W, and what share of their FLOPs cannot.

The gradient of a matrix can wait wherever a product reads it: the matrix itself, or a *weight expression*: what
operations make of parameters alone (a transposed matrix, a parametrization, the experts that a router chose by index).
B then computes the product's gradient for its input only, and W the rest, back to the parameters.

Source: zero-bubble pipeline parallelism (Qi et al. 2023), section 2.1: the two gradients of a product are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.graph.dims import Sizes
from raypipe.graph.operation_costs import matrix_flops, short_name
from raypipe.graph.operations import ATTENTION, OperationGraph

PLACES: dict[str, tuple[int, ...]] = (
    {"linear": (1, 2), "addmm": (0, 2, 1), "baddbmm": (0, 2, 1), "mm": (1, 0), "bmm": (1, 0), "matmul": (1, 0)}
    | {"mv": (0,), "einsum": (1,), "_grouped_mm": (1, 3), "grouped_mm_fallback": (1,), "conv1d": (1, 2)}
    | {"conv2d": (1, 2), "conv3d": (1, 2), "conv_transpose1d": (1, 2), "conv_transpose2d": (1, 2)}
    | {"conv_transpose3d": (1, 2), "embedding": (0,), "embedding_bag": (0,), "_embedding_bag": (0,)}
    | {"index": (0,), "index_select": (0,), "lstm": (2,), "gru": (2,), "rnn_tanh": (2,), "rnn_relu": (2,)}
)
"""Per operation, the arguments that may be weights; for ``einsum`` and recurrent ones, a list of tensors."""
GATHERS = {"index", "index_select", "select", "slice", "gather"}
"""Operations whose result is a weight expression whatever chooses the rows."""
PRODUCTS = set(PLACES) - {"embedding", "embedding_bag", "_embedding_bag", "index", "index_select"}


def weight_expressions(graph: OperationGraph) -> tuple[bool, ...]:
    """Return, per operation, whether its result is made of parameters alone, as far as gradients are concerned.

    >>> from raypipe.graph.operations import Operation, Source, TensorType
    >>> square = TensorType((4, 4), "float32")
    >>> sources = {"w": Source("parameter", square, True), "x": Source("input", square)}
    >>> t = Operation("t", "aten.t.default", ({"of": "w"},), type=square)
    >>> y = Operation("y", "aten.mm.default", ({"of": "x"}, {"op": 0}), type=square)
    >>> weight_expressions(OperationGraph((t, y), sources, {"y": 1}))
    (True, False)
    """
    found: list[bool] = []
    for number, operation in enumerate(graph.operations):
        name = short_name(operation.target)
        read = [found[o] if isinstance(o, int) else graph.sources[o].kind == "parameter" for o in operation.operands]
        fixed = [
            fine or (isinstance(o, str) and graph.sources[o].kind in ("buffer", "constant"))
            for o, fine in zip(operation.operands, read, strict=True)
        ]
        whole = bool(fixed) and all(fixed) and any(read)
        gathered = bool(read) and read[0] and name in GATHERS
        found.append((whole or gathered) and not operation.random and graph.requires_grad[number])
    return tuple(found)


def weight_flops(graph: OperationGraph, number: int, sizes: Sizes, expressions: Sequence[bool]) -> float:
    """Count the FLOPs of an operation's weight gradient: those of its forward, if it multiplies by a trained weight."""
    operation = graph.operations[number]
    flops = matrix_flops(graph, operation, sizes)
    if flops is None or expressions[number]:
        return 0.0
    factors = operation.operands[:3] if operation.target == ATTENTION else operation.operands  # not its mask
    trained = any(
        expressions[o]
        if isinstance(o, int)
        else graph.sources[o].requires_grad and len(graph.sources[o].type.shape) > 1
        for o in factors
    )
    return flops if trained else 0.0


def split_flops(graph: OperationGraph, span: range, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOPs of these operations' weight gradients, and how many of them B computes even when it is split."""
    expressions = weight_expressions(graph)
    total = left = 0.0
    for number in span:
        flops = weight_flops(graph, number, sizes, expressions)
        total += flops
        left += flops if short_name(graph.operations[number].target) not in PRODUCTS else 0.0
    return total, left
