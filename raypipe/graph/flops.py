"""Count the floating-point operations of an operation's forward from shapes.

A multiply-add of a matrix product or convolution counts two; other operations count one per value written. Of causal
attention, only the half of the scores that is not masked counts. The backward of a matrix product costs twice its
forward: once for the input's gradient, and once for the weight's.
"""

from __future__ import annotations

from math import prod

from raypipe.graph.dims import Sizes, evaluate_all
from raypipe.graph.operations import Operation, OperationGraph, TensorType

MOVES_NOTHING = (
    {"view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t"}
    | {"unsqueeze", "squeeze", "slice", "select", "split", "chunk", "unbind", "detach"}
    | {"alias", "flatten", "unflatten", "getitem", "sym_size", "numpy_T", "mT"}
)
"""Operations that usually return a view of their input."""


def forward_flops(graph: OperationGraph, number: int, sizes: Sizes) -> float:
    """Count the floating-point operations of one forward of an operation."""
    operation = graph.operations[number]
    product = matrix_flops(graph, operation, sizes)
    if product is not None:
        return product / 2 if operation.causal else product
    if operation.type is None or not operation.type.floating or short_name(operation.target) in MOVES_NOTHING:
        return 0.0
    return float(prod(evaluate_all(operation.type.shape, sizes)))


def matrix_flops(graph: OperationGraph, operation: Operation, sizes: Sizes) -> float | None:
    """Count the floating-point operations of a matrix product, attention or convolution; None for other operations.

    Those of attention are of all scores.
    """
    name = short_name(operation.target)
    shapes = [evaluate_all(t.shape, sizes) if t is not None else () for t in operand_types(graph, operation)]
    if name in ("scaled_dot_product_attention", "_scaled_dot_product_attention_math"):
        *batch, queries, width = shapes[0]
        return 2.0 * prod(batch) * queries * shapes[1][-2] * (width + shapes[2][-1])
    if operation.target == "raypipe.module.default":  # an opaque module counts as one product with each of its matrices
        matrices = [
            prod(s) for o, s in zip(operation.operands, shapes, strict=True) if isinstance(o, str) and len(s) > 1
        ]
        return 2.0 * sum(matrices) * prod(shapes[0][:-1])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # each step multiplies by every matrix once
        return 2.0 * prod(shapes[0][:-1]) * sum(prod(s) for s in shapes[1:] if len(s) == 2)
    if operation.type is None:
        return None
    written = prod(evaluate_all(operation.type.shape, sizes))
    if name == "linear":
        return 2.0 * written * shapes[1][-1]
    if name in ("mm", "bmm", "matmul", "mv", "dot", "_grouped_mm", "grouped_mm_fallback"):
        return 2.0 * written * shapes[0][-1]
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return 2.0 * written * shapes[1][-1]
    if name == "einsum":
        return _einsum(operation.equation, shapes)
    if name in ("convolution", "conv1d", "conv2d", "conv3d", "_convolution"):
        return 2.0 * written * prod(shapes[1][1:])
    if name.startswith("conv_transpose"):
        return 2.0 * prod(shapes[0]) * prod(shapes[1][1:])
    return None


def _einsum(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Count a multiply-add per combination of all indices, which is exact for two operands, the usual case."""
    length: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=False):
        before, dots, after = term.partition("...")
        rest = len(shape) - len(before) - len(after)
        labels = [*before, *(f".{i}" for i in range(rest if dots else 0)), *after]
        for label, size in zip(labels, shape, strict=False):
            length[label] = max(length.get(label, 1), size)
    return 2.0 * prod(length.values())


def operand_types(graph: OperationGraph, operation: Operation) -> list[TensorType | None]:
    """Return the type of each operand."""
    return [
        graph.operations[operand].type if isinstance(operand, int) else graph.sources[operand].type
        for operand in operation.operands
    ]


def short_name(target: str) -> str:
    """Return an operation's name without its library and overload.

    >>> short_name("aten.linear.default"), short_name("operator.getitem")
    ('linear', 'getitem')
    """
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target
