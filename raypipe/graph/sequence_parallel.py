"""Sequence parallelism: between the layers that tensor ranks divide, each rank has a share of the positions.

The pass works on the operations of a captured model whose layers are divided already (``tensor/divide.py``). There an
all-reduce ends divided layers (``reduce_from_group``), and what follows is computed alike on all ranks until the next
ones begin (``copy_to_group``). If the operations in between compute every position by itself, the all-reduce becomes a
reduce-scatter over the positions and the beginning an all-gather (``tensor/operators.py``): the same bytes travel, and
each rank computes and keeps a share. An operation that is not known to compute positions by themselves gets all of
them, by an all-gather of its own. Gradients of parameters that are read there are summed over the ranks.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from raypipe.errors import CaptureError, SpecError
from raypipe.graph.dims import symbols
from raypipe.graph.operation_costs import short_name
from raypipe.graph.operations import Operation, OperationGraph, Plain, TensorType
from raypipe.graph.positions import BY_POSITION, FlowReader
from raypipe.job.parallel_spec import SEQUENCE_KEY


class _Translated(NamedTuple):
    """Where a result of the old graph is in the new one."""

    number: int
    divided: bool
    """Whether each rank has its share of the positions."""


def divide_sequence(graph: OperationGraph, size: int) -> OperationGraph:
    """Return the graph with the positions between divided layers divided over ``size`` tensor ranks.

    Raises:
        SpecError: the model's inputs are not sequences of one length that may vary.
    """
    try:
        return _Pass(graph, size).run()
    except CaptureError as error:
        raise SpecError(
            SEQUENCE_KEY, f"{error.where}: {error.why}", "use false, or a model of token sequences"
        ) from None


class _Pass:
    def __init__(self, graph: OperationGraph, size: int) -> None:
        self.graph, self.size, self.reader = graph, size, FlowReader(graph)
        self.made: list[Operation] = []
        self.held: list[_Translated] = []
        self.others: dict[tuple[int, bool], int] = {}
        """Per old result, the number of the same with all positions (False), or with each rank's (True)."""

    def run(self) -> OperationGraph:
        for number, operation in enumerate(self.graph.operations):
            self.held.append(self.translate(number, operation))
        outputs = {name: self.as_(number, False, self.made[-1]) for name, number in self.graph.outputs.items()}
        return replace(self.graph, operations=tuple(self.made), outputs=outputs)

    def translate(self, number: int, operation: Operation) -> _Translated:
        name, along = short_name(operation.target), self.along(operation.type)
        in_place = name.endswith("_") and not name.startswith("__")
        if in_place and any(self.held[one].divided for one in operation.inputs[:1]):
            raise CaptureError(operation.name, f"{operation.target} writes what other operations read", "")
        if name == "reduce_from_group" and along is not None:
            operand = self.as_(operation.inputs[0], False, operation)
            return self.add(self.exchange("scatter", operation, operand, along, summed=True), True)
        if not any(self.held[one].divided for one in operation.inputs):
            return self.add(self.reading(operation, False), False)
        if name == "copy_to_group":
            assert along is not None
            operand = self.as_(operation.inputs[0], True, operation)
            return self.add(self.exchange("gather", operation, operand, along, summed=True), False)
        if self.same_shape(operation):
            return self.held[operation.inputs[0]]
        if name in BY_POSITION and along is not None and self.by_position(operation, along):
            kind = operation.type
            assert kind is not None
            own = replace(operation, type=self.share(kind, along))
            return self.add(self.reading(own, True), True)
        return self.add(self.reading(operation, False), False)

    def along(self, kind: TensorType | None) -> int | None:
        """Return the dimension that is the sequence; None if there is none, or several."""
        if kind is None:
            return None
        dims = [d for d, n in enumerate(kind.shape) if self.reader.length in symbols(n)]
        return dims[0] if len(dims) == 1 and kind.shape[dims[0]] == self.reader.length else None

    def by_position(self, operation: Operation, along: int) -> bool:
        """Return whether each rank can compute its positions from those of the operands."""
        for operand in operation.operands:
            kind = self.graph.type_of(operand)
            if kind is None:  # a size, or several results
                return False
            has_length = any(self.reader.length in symbols(n) for n in kind.shape)
            if has_length and (self.along(kind) is None or isinstance(operand, str)):
                return False
        return self.reader.refusal(short_name(operation.target), operation, along, operation.name) is None

    def same_shape(self, operation: Operation) -> bool:
        """Return whether an operation gives a tensor the shape that it has, or takes a slice that is all of it."""
        return (
            short_name(operation.target) in ("view", "reshape", "contiguous", "slice")
            and operation.type == self.graph.type_of(operation.operands[0])
            and self.held[operation.inputs[0]].divided
        )

    def reading(self, operation: Operation, divided: bool) -> Operation:
        """Return the operation with its operands as they are in the new graph."""

        def read(value: Plain) -> Plain:
            if isinstance(value, list):
                return [read(one) for one in value]
            if not isinstance(value, dict):
                return value
            if divided and (number := self.summed(value, operation)) is not None:
                return {"op": number}
            return {"op": self.as_(value["op"], divided, operation)} if "op" in value else value

        args = tuple(map(read, operation.args))
        return replace(operation, args=args, kwargs={name: read(one) for name, one in operation.kwargs.items()})

    def summed(self, value: Plain, reader: Operation) -> int | None:
        """Return what stands for an operand without positions whose gradients the ranks sum up; None for others."""
        operand = value.get("op", value.get("of"))
        kind = None if operand is None else self.graph.type_of(operand)
        if kind is None or self.along(kind) is not None:
            return None
        if isinstance(operand, int):
            wanted, held = self.graph.requires_grad[operand], {"op": self.as_(operand, False, reader)}
        else:
            wanted, held = self.graph.sources[operand].requires_grad, value
        if not wanted:
            return None
        self.made.append(
            Operation(
                f"{reader.name}_sums_{len(self.made)}",
                "raypipe.copy_to_group.default",
                (held,),
                type=kind,
                module=reader.module,
                source=reader.source,
            )
        )
        return len(self.made) - 1

    def as_(self, number: int, divided: bool, reader: Operation) -> int:
        """Return the number of an old result with each rank's positions, or with all of them."""
        held, kind = self.held[number], self.graph.operations[number].type
        along = self.along(kind)
        if held.divided == divided or along is None or kind is None:
            return held.number
        key = number, divided
        if key not in self.others:
            how, suffix = ("scatter", "own") if divided else ("gather", "all")
            what = replace(reader, name=f"{self.graph.operations[number].name}_{suffix}", type=kind)
            made = self.exchange(how, what, held.number, along, summed=False)
            self.others[key] = self.add(made, divided).number
        return self.others[key]

    def exchange(self, what: str, operation: Operation, operand: int, along: int, *, summed: bool) -> Operation:
        assert operation.type is not None
        kind = self.share(operation.type, along) if what == "scatter" else operation.type
        args = ({"op": operand}, along, self.size, summed)
        target = f"raypipe.{what}_sequence.default"
        return replace(operation, target=target, args=args, kwargs={}, type=kind, random=False, mutates=())

    def share(self, kind: TensorType, along: int) -> TensorType:
        shape = (*kind.shape[:along], f"({kind.shape[along]})//{self.size}", *kind.shape[along + 1 :])
        return replace(kind, shape=shape)

    def add(self, operation: Operation, divided: bool) -> _Translated:
        self.made.append(operation)
        return _Translated(len(self.made) - 1, divided)
