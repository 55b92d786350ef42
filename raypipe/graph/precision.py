"""The item size of every result of a captured model when it runs: as captured, or as 16-bit autocast makes it."""

from __future__ import annotations

from raypipe.graph.flops import short_name
from raypipe.graph.operations import ITEM_BYTES, Operation, OperationGraph

AUTOCAST_BYTES = 2
"""Bytes per value of products under autocast."""
PRODUCTS = {
    "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "addbmm", "mv", "addmv", "einsum", "convolution",
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
}  # fmt: skip
"""Operations that autocast runs in 16 bits."""
IN_FLOAT32 = {
    "layer_norm", "group_norm", "batch_norm", "softmax", "_softmax", "_safe_softmax", "log_softmax", "pow", "rsqrt",
    "exp", "log", "sum", "prod", "cumsum", "norm", "reciprocal", "softplus", "tan", "erfinv", "cosh", "sinh",
}  # fmt: skip
"""Operations that autocast runs in float32; all other operations run in the widest dtype of their operands."""


def is_product(operation: Operation) -> bool:
    """Return whether autocast runs an operation in 16 bits."""
    return short_name(operation.target) in PRODUCTS


def widths(graph: OperationGraph, autocast: bool) -> tuple[int, ...]:
    """Return, per operation, the bytes per value of its result; 0 if it is not a tensor.

    ``autocast`` says whether the model runs under 16-bit autocast. An operation with several results, such as a split,
    has the item size of its operands.
    """
    found: list[int] = []
    for operation in graph.operations:
        kind = operation.type
        own = 0 if kind is None else ITEM_BYTES[kind.dtype]
        if kind is not None and (not autocast or not kind.floating or short_name(operation.target) in IN_FLOAT32):
            found.append(own)
        elif is_product(operation):
            found.append(AUTOCAST_BYTES if autocast else own)
        else:
            read = [operand_width(graph, found, operand) for operand in operation.operands]
            found.append(max((w for w in read if w), default=own))
    return tuple(found)


def operand_width(graph: OperationGraph, results: list[int] | tuple[int, ...], operand: int | str) -> int:
    """Return the bytes per value of a floating-point operand, before any cast; 0 for others and for scalar tensors."""
    if isinstance(operand, int) and graph.operations[operand].type is None:
        return results[operand]
    kind = graph.operations[operand].type if isinstance(operand, int) else graph.sources[operand].type
    if kind is None or not kind.floating or not kind.shape:
        return 0
    return results[operand] if isinstance(operand, int) else ITEM_BYTES[kind.dtype]
