"""How wide every result of a captured model is when it runs: as captured, or narrower under 16-bit autocast."""

from __future__ import annotations

from raypipe.graph.flops import short_name
from raypipe.graph.operations import ITEM_BYTES, Operation, OperationGraph

NARROW = 2
"""Bytes of what products compute with under autocast."""
PRODUCTS = {
    "linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "addbmm", "mv", "addmv", "einsum", "convolution",
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math",
}  # fmt: skip
"""Operations that autocast runs in 16 bits."""
WIDE = {
    "layer_norm", "group_norm", "batch_norm", "softmax", "_softmax", "_safe_softmax", "log_softmax", "pow", "rsqrt",
    "exp", "log", "sum", "prod", "cumsum", "norm", "reciprocal", "softplus", "tan", "erfinv", "cosh", "sinh",
}  # fmt: skip
"""Operations that autocast runs in float32; all others take what comes, the widest of their operands."""


def is_product(operation: Operation) -> bool:
    """Whether autocast makes it narrow."""
    return short_name(operation.target) in PRODUCTS


def widths(graph: OperationGraph, narrow: bool) -> tuple[int, ...]:
    """Per operation, the bytes of a value of its result; ``narrow``: under 16-bit autocast. 0 where it is no tensor.

    One with several results is as wide as what it reads: it takes a tensor apart.
    """
    found: list[int] = []
    for operation in graph.operations:
        kind = operation.type
        own = 0 if kind is None else ITEM_BYTES[kind.dtype]
        if kind is not None and (not narrow or not kind.floating or short_name(operation.target) in WIDE):
            found.append(own)
        elif is_product(operation):
            found.append(NARROW if narrow else own)
        else:
            read = [operand_width(graph, found, operand) for operand in operation.operands]
            found.append(max((w for w in read if w), default=own))
    return tuple(found)


def operand_width(graph: OperationGraph, results: list[int] | tuple[int, ...], operand: int | str) -> int:
    """Bytes of a value of a floating-point operand as it comes; 0 for others, and for numbers that are tensors."""
    if isinstance(operand, int) and graph.operations[operand].type is None:
        return results[operand]
    kind = graph.operations[operand].type if isinstance(operand, int) else graph.sources[operand].type
    if kind is None or not kind.floating or not kind.shape:
        return 0
    return results[operand] if isinstance(operand, int) else ITEM_BYTES[kind.dtype]
