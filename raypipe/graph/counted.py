"""A model's operations with the sizes of their tensors for one sample, as the counting of work reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from raypipe.graph.dims import Sizes, count, evaluate_all
from raypipe.graph.liveness import replicated
from raypipe.graph.operation_costs import (
    AUTOCAST_BYTES,
    Autocast,
    is_product,
    is_view,
    operand_width,
    short_name,
    widths,
)
from raypipe.graph.operations import ITEM_BYTES, OperationGraph


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
        kind = self.graph.type_of(operand)
        if kind is None or not kind.floating:
            return self.bytes(operand)
        return float(self.values(operand) * (AUTOCAST_BYTES if self.autocast else ITEM_BYTES[kind.dtype]))
