"""A model's operations with the sizes of their tensors for one sample, as the counting of work reads them.

What autocast runs in 16 bits is a table of torch's, restated since the planner counts without torch; a test holds it
against what torch does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from raypipe.graph.dims import Sizes, count, evaluate_all
from raypipe.graph.liveness import replicated
from raypipe.graph.operation_costs import is_view, short_name
from raypipe.graph.operations import ITEM_BYTES, Operation, OperationGraph

# The item size of every result when a model runs: as captured, or as 16-bit autocast makes it.
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
    result: list[int] = []
    for operation in graph.operations:
        kind = operation.type
        own = 0 if kind is None else ITEM_BYTES[kind.dtype]
        name = short_name(operation.target)
        as_captured = autocast is None or name in autocast.in_float32 or is_cast(operation)
        if kind is not None and (as_captured or not kind.floating):
            result.append(own)
        elif autocast is not None and name in autocast.products:
            result.append(AUTOCAST_BYTES)
        else:
            read = [operand_width(graph, result, operand) for operand in operation.operands]
            result.append(max((w for w in read if w), default=own))
    return tuple(result)


def is_cast(operation: Operation) -> bool:
    """Return whether an operation names the dtype of its result."""
    given = (*operation.args, *operation.kwargs.values())
    return short_name(operation.target) in ("to", "_to_copy") and any(
        isinstance(value, dict) and "dtype" in value for value in given
    )


def without_idle_casts(graph: OperationGraph, autocast: Autocast | None) -> OperationGraph:
    """Return the graph with casts to the dtype that a tensor has as views of it: ``Tensor.to`` returns the tensor.

    ``autocast`` is that of the device, if the model runs under it: what it makes of products decides which those are.
    """
    sizes = widths(graph, autocast)

    def idle(operation: Operation, width: int) -> bool:
        to = is_cast(operation) and short_name(operation.target) == "to" and not operation.argument(3, "copy", False)
        return to and operand_width(graph, sizes, operation.operands[0]) == width

    made = [
        replace(one, target="aten.alias.default", args=one.args[:1], kwargs={}) if idle(one, width) else one
        for one, width in zip(graph.operations, sizes, strict=True)
    ]
    return replace(graph, operations=tuple(made))


def operand_width(graph: OperationGraph, results: Sequence[int], operand: int | str) -> int:
    """Return the bytes per value of a floating-point operand, before any cast; 0 for others and for scalar tensors."""
    kind = graph.type_of(operand)
    if isinstance(operand, int) and kind is None:
        return results[operand]
    if kind is None or not kind.floating or not kind.shape:
        return 0
    return results[operand] if isinstance(operand, int) else ITEM_BYTES[kind.dtype]


@dataclass(frozen=True)
class Counted:
    """A model with the sizes of its operations' tensors."""

    graph: OperationGraph
    one: Sizes
    autocast: Autocast | None
    _values: dict[int | str, int] = field(default_factory=dict)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Return, per operation, the bytes per value of its result."""
        return widths(self.graph, self.autocast)

    @cached_property
    def replicated(self) -> tuple[bool, ...]:
        """Return, per operation, whether every stage computes it itself."""
        return replicated(self.graph)

    def values(self, operand: int | str) -> int:
        """Return the number of elements of an operand."""
        if operand not in self._values:
            kind = self.graph.type_of(operand)
            self._values[operand] = 0 if kind is None else count(kind.shape, self.one)
        return self._values[operand]

    def bytes(self, operand: int | str) -> float:
        """Return the bytes of an operand, before any cast."""
        if isinstance(operand, int):
            return float(self.values(operand) * self.widths[operand])
        return float(self.values(operand) * ITEM_BYTES[self.graph.sources[operand].type.dtype])

    def name(self, number: int) -> str:
        """Return an operation's name without its library and overload."""
        return short_name(self.graph.operations[number].target)

    def is_parameter(self, operand: int | str) -> bool:
        """Return whether an operand is a parameter itself."""
        return isinstance(operand, str) and self.graph.sources[operand].kind == "parameter"

    def parameter_of(self, operand: int | str) -> str | None:
        """Return the parameter that an operand is, or is a view of."""
        while isinstance(operand, int):
            if not is_view(self.graph, operand) or len(self.graph.operations[operand].operands) != 1:
                return None
            operand = self.graph.operations[operand].operands[0]
        return operand if self.is_parameter(operand) else None

    def rows(self, number: int) -> int:
        """Return the first dimension of a result; 0 of what is none."""
        kind = self.graph.operations[number].type
        return 0 if kind is None or not kind.shape else evaluate_all(kind.shape[:1], self.one)[0]

    def casts(self, number: int) -> list[int | str]:
        """Return the operands of a product that autocast casts to 16 bits."""
        operation = self.graph.operations[number]
        if self.autocast is None or not is_product(operation, self.autocast):
            return []
        return [o for o in operation.operands if operand_width(self.graph, self.widths, o) > AUTOCAST_BYTES]

    def entering(self, number: int, operand: int | str) -> float:
        """Return the bytes of a product's operand as the product reads it, after any cast."""
        kind, operation = self.graph.type_of(operand), self.graph.operations[number]
        if kind is None or not kind.floating or self.autocast is None or not is_product(operation, self.autocast):
            return self.bytes(operand)
        return float(self.values(operand) * AUTOCAST_BYTES)
