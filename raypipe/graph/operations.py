"""A model as a list of operations in the order they run, without torch, for partitioning and planning.

An operation reads *operands*: results of earlier operations, and the model's *sources* (its parameters, buffers,
constants and raw inputs) by name. Shapes may depend on the sizes of the inputs (``dims``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from raypipe.graph.calls import Call
from raypipe.graph.dims import Dim, Sizes, count, symbols

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
ITEM_BYTES |= {"int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16}
"""Bytes of one value, by dtype."""
GETITEM = "operator.getitem"
"""Target of the operation that selects one result of an operation with several."""
DETACHED = {"aten.detach.default", "aten.argmax.default", "aten.zeros_like.default", "aten.ones_like.default"}
"""Operations through which no gradient flows, although their result may be floating-point."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor."""

    shape: tuple[Dim, ...]
    dtype: str

    def bytes(self, sizes: Sizes) -> int:
        """Return the size in bytes for inputs of these sizes."""
        return count(self.shape, sizes) * ITEM_BYTES[self.dtype]

    @property
    def floating(self) -> bool:
        """Return whether gradients can flow through such a tensor."""
        return "float" in self.dtype or "complex" in self.dtype


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that operations read and that no operation computes."""

    kind: str
    """``parameter``, ``buffer``, ``constant`` or ``input``."""
    type: TensorType
    requires_grad: bool = False
    """Whether it is a parameter that is trained."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the model's forward."""

    name: str
    """Name given by torch, unique in the model."""
    target: str
    """The called function, as torch prints it: ``aten.linear.default``."""
    operands: tuple[int | str, ...]
    """Numbers of operations and names of sources in the order of the call, without plain numbers and flags."""
    type: TensorType | None
    """Type of its result; None for plain numbers and for operations with several results, whose items have types."""
    module: str = ""
    """Path of the innermost module that called it."""
    source: str = ""
    """``file:line`` of that call in the model's code."""
    random: bool = False
    """Whether it draws random numbers, so that computing it twice gives two results."""
    mutates: tuple[str, ...] = ()
    """Names of the buffers that it writes in place (running statistics)."""
    equation: str = ""
    """The equation of an ``einsum``."""
    causal: bool = False
    """Whether it is attention in which every query sees only the keys up to its own position."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the operations whose results it reads."""
        return tuple(operand for operand in self.operands if isinstance(operand, int))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources it reads."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))


@dataclass(frozen=True)
class OperationGraph:
    """All operations of a model's forward, in an order in which they can run."""

    operations: tuple[Operation, ...]
    sources: Mapping[str, Source]
    """Parameters, buffers, constants and raw inputs. Tied parameters appear once, under their owner's name."""
    outputs: Mapping[str, int]
    """Per output of the model (``loss``, ``logits``), the operation that computes it."""
    tied: tuple[tuple[str, ...], ...] = ()
    """Groups of names of tied parameters, the owner (the name in ``sources``) first."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class of each module that calls an operation, by the module's path."""
    example: Mapping[str, int] = field(default_factory=dict)
    """Values of the symbols for the inputs that the model was captured with."""
    at_least: Mapping[str, int] = field(default_factory=dict)
    """Lower bounds of symbols, below which the model's code would have taken another branch."""
    at_most: Mapping[str, int] = field(default_factory=dict)
    """Upper bounds of symbols, beyond which an attention mask that was replaced might have said something else."""

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Number of elements of each parameter, tied ones once."""
        return {n: count(s.type.shape, {}) for n, s in self.sources.items() if s.kind == "parameter"}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the raw inputs."""
        return tuple(n for n, s in self.sources.items() if s.kind == "input")

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Per operation, the operations that read its result, each once, in order."""
        found: list[list[int]] = [[] for _ in self.operations]
        for number, operation in enumerate(self.operations):
            for used in dict.fromkeys(operation.inputs):
                found[used].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        """Per operation, whether a gradient flows through its result to a trained parameter."""
        found: list[bool] = []
        for operation in self.operations:
            reads = any(found[i] for i in operation.inputs) or any(
                self.sources[name].requires_grad for name in operation.sources
            )
            floating = operation.type is None or operation.type.floating
            found.append(reads and floating and operation.target not in DETACHED)
        return tuple(found)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Per operation, the repeated block of the model that it is in, or ""; see ``repeated_blocks``."""
        repeated = repeated_blocks(self.classes)
        return tuple(owner_among(repeated, operation.module) for operation in self.operations)

    @cached_property
    def layers(self) -> int:
        """Number of repeated blocks that have parameters."""
        return len(self.block_parameters)

    @cached_property
    def block_parameters(self) -> dict[str, int]:
        """Number of elements of the parameters of each repeated block that has any."""
        read: dict[str, set[str]] = {}
        for block, operation in zip(self.blocks, self.operations, strict=True):
            if block and (names := self.parameters_of([operation])):
                read.setdefault(block, set()).update(names)
        return {block: sum(self.parameters[name] for name in names) for block, names in read.items()}

    def parameters_of(self, operations: Sequence[Operation]) -> tuple[str, ...]:
        """Return the parameters that these operations read, each once, in the order of first use."""
        read = (name for operation in operations for name in operation.sources)
        return tuple(dict.fromkeys(name for name in read if self.sources[name].kind == "parameter"))

    def grows(self, number: int) -> bool:
        """Return whether the size of an operation's result depends on the sizes of the inputs."""
        kind = self.operations[number].type
        return kind is not None and any(symbols(dim) for dim in kind.shape)

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the symbols' values for raw inputs of these shapes.

        Raises:
            RequestError: as ``dims.bind``.
        """
        from raypipe.graph.dims import bind

        return bind({name: self.sources[name].type.shape for name in self.inputs}, shapes)


def repeated_blocks(classes: Mapping[str, str]) -> frozenset[str]:
    """Return the numbered modules that repeat: those with a sibling of the same class, the outermost on each path.

    ``classes`` holds the class of each module by its path.

    >>> sorted(repeated_blocks({"h.0": "Block", "h.1": "Block", "h.0.experts.0": "Mlp", "h.0.experts.1": "Mlp"}))
    ['h.0', 'h.1']
    """
    siblings: dict[tuple[str, str], set[str]] = {}
    for path, kind in classes.items():
        parent, _, name = path.rpartition(".")
        if name.isdecimal():
            siblings.setdefault((parent, kind), set()).add(path)
    repeated = {path for group in siblings.values() if len(group) > 1 for path in group}
    return frozenset(path for path in repeated if not any(path.startswith(f"{outer}.") for outer in repeated))


def owner_among(blocks: frozenset[str], module: str) -> str:
    """Return the block that contains a module, or "".

    >>> owner_among(frozenset({"h.3"}), "h.3.attn.c_proj"), owner_among(frozenset({"h.3"}), "h.31.attn")
    ('h.3', '')
    """
    parts = module.split(".")
    return next((p for n in range(1, len(parts) + 1) if (p := ".".join(parts[:n])) in blocks), "")


def needed(operations: Sequence[Operation], outputs: Iterable[int]) -> set[int]:
    """Return the operations that outputs and writes to buffers need, directly or indirectly."""
    keep: set[int] = set()
    todo = [*outputs, *(n for n, o in enumerate(operations) if o.mutates)]
    while todo:
        number = todo.pop()
        if number not in keep:
            keep.add(number)
            todo.extend(operations[number].inputs)
    return keep


def selected(
    operations: Sequence[Operation], calls: Sequence[Call], order: Sequence[int]
) -> tuple[tuple[Operation, ...], tuple[Call, ...], dict[int, int]]:
    """Return operations and calls in this order with their new numbers, and these by the old ones."""
    new = {old: position for position, old in enumerate(order)}
    kept = tuple(
        replace(operations[n], operands=tuple(new[o] if isinstance(o, int) else o for o in operations[n].operands))
        for n in order
    )
    return kept, tuple(calls[n].renumbered(new) for n in order), new
