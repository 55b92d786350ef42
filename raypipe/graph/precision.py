"""The item size of every result of a captured model when it runs: as captured, or as 16-bit autocast makes it."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.graph.flops import short_name
from raypipe.graph.operations import ITEM_BYTES, Operation, OperationGraph

AUTOCAST_BYTES = 2
"""Bytes per value of products under autocast."""
PRODUCTS = frozenset(
    {"linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "addbmm", "mv", "addmv", "einsum"}
    | {"convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"}
    | {"conv_transpose3d", "scaled_dot_product_attention", "_scaled_dot_product_attention_math"}
)
IN_FLOAT32 = frozenset(
    {"layer_norm", "group_norm", "batch_norm", "softmax", "_softmax", "_safe_softmax", "log_softmax", "pow", "rsqrt"}
)
IN_FLOAT32 |= {"exp", "log", "sum", "prod", "cumsum", "norm", "reciprocal", "softplus", "tan", "erfinv", "cosh", "sinh"}


@dataclass(frozen=True)
class Autocast:
    """The rules of 16-bit autocast on a kind of device; other operations run in their operands' widest dtype."""

    products: frozenset[str]
    """Operations that run in 16 bits."""
    in_float32: frozenset[str]
    """Operations that run in float32."""


ON_GPU = Autocast(PRODUCTS, IN_FLOAT32)
ON_CPU = Autocast(
    PRODUCTS - {"mv", "addmv", "convolution", "_convolution", "_scaled_dot_product_attention_math"},
    frozenset({"prod"}),
)
"""The two lists are torch's own (``aten/src/ATen/autocast_mode.h``). A CPU's norms, softmax and powers run in the dtype
that arrives: GELU written out (``gelu_new``) takes half the bytes there."""


def is_product(operation: Operation, autocast: Autocast) -> bool:
    """Return whether autocast runs an operation in 16 bits."""
    return short_name(operation.target) in autocast.products


def widths(graph: OperationGraph, autocast: Autocast | None) -> tuple[int, ...]:
    """Return, per operation, the bytes per value of its result; 0 if it is not a tensor.

    ``autocast`` is that of the device, if the model runs under it. An operation with several results, such as a split,
    has the item size of its operands.
    """
    found: list[int] = []
    for operation in graph.operations:
        kind = operation.type
        own = 0 if kind is None else ITEM_BYTES[kind.dtype]
        name = short_name(operation.target)
        as_captured = autocast is None or name in autocast.in_float32 or (kind is not None and not kind.floating)
        if kind is not None and as_captured:
            found.append(own)
        elif autocast is not None and name in autocast.products:
            found.append(AUTOCAST_BYTES)
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
