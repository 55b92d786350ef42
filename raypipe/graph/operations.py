"""A model as a list of operations in the order they run, without torch, for partitioning and planning.

An operation reads *operands*: results of earlier operations, and the model's *sources* (its parameters, buffers,
constants and raw inputs) by name. Shapes may depend on the sizes of the inputs (``dims``).

Its arguments are JSON data, which can be read without executing any code. Results of operations are ``{"op": number}``;
parameters, buffers, constants and raw inputs are ``{"of": name}``. Values that JSON cannot represent are
``{"float": "inf"}``, ``{"dtype": "float32"}``, ``{"device": "cpu"}``, ``{"layout": ..}``, ``{"memory_format": ..}``.
Other values are stored as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from raypipe.graph.dims import Dim, Sizes, bind, count

Plain = Any
"""JSON data."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
ITEM_BYTES |= {"int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16}
"""Bytes of one value, by dtype."""
ATTENTION = "aten.scaled_dot_product_attention.default"
"""Its arguments are (query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False), and by name ``scale`` and
``enable_gqa``."""
GETITEM = "operator.getitem"
"""Target of the operation that selects one result of an operation with several."""
DETACHED = {"aten.detach.default", "aten.argmax.default", "aten.zeros_like.default", "aten.ones_like.default"}
"""Operations through which no gradient flows, although their result may be floating-point."""

SCALES = (
    "aten.mul.",
    "aten.div.",
    "aten.tanh.",
    "aten.add.",
    "aten.to.",
    "aten._to_copy.",
    "raypipe.gather_from_group.",
)
"""How the names of operations begin that, with one tensor, work on every value by itself, or gather whole rows."""


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


@dataclass(frozen=True)
class Operation:
    """One call of the model's forward."""

    name: str
    """Name given by torch, unique in the model."""
    target: str
    """The called function, as torch prints it: ``aten.linear.default``."""
    args: tuple[Plain, ...]
    kwargs: Mapping[str, Plain] = field(default_factory=dict)
    type: TensorType | None = None
    """Type of its result; None for plain numbers and for operations with several results, whose items have types."""
    module: str = ""
    """Path of the innermost module that called it."""
    source: str = ""
    """``file:line`` of that call in the model's code."""
    random: bool = False
    """Whether it draws random numbers, so that computing it twice gives two results."""
    mutates: tuple[str, ...] = ()
    """Names of the buffers that it writes in place (running statistics)."""

    @cached_property
    def operands(self) -> tuple[int | str, ...]:
        """Numbers of operations and names of sources in the order of the call, without plain numbers and flags."""
        return tuple(_operands([*self.args, *self.kwargs.values()]))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the operations whose results it reads."""
        return tuple(operand for operand in self.operands if isinstance(operand, int))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources it reads."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))

    def argument(self, place: int, name: str = "", default: Plain = None) -> Plain:
        """Return an argument, given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def equation(self) -> str:
        """Return the equation of an ``einsum``; "" for other operations."""
        return str(self.args[0]) if self.target.startswith("aten.einsum") else ""

    @property
    def mask(self) -> int | None:
        """Return the operation that computes the mask of an attention; None if no operation does."""
        value = self.argument(3, "attn_mask") if self.target == ATTENTION else None
        return value.get("op") if isinstance(value, dict) else None

    @property
    def causal(self) -> bool:
        """Return whether it is attention in which a query sees no later key, other than by a mask."""
        return self.target == ATTENTION and bool(self.argument(5, "is_causal", False))

    def without_mask(self, causal: bool) -> Operation:
        """Return the same attention without a mask, ``causal`` or not."""
        args = (*self.args[:3], None, *self.args[4:]) if len(self.args) > 4 else self.args[:3]
        kwargs = {name: value for name, value in self.kwargs.items() if name != "attn_mask"}
        if len(args) > 5:
            args = (*args[:5], causal, *args[6:])
        elif causal:
            kwargs["is_causal"] = True
        return replace(self, args=args, kwargs=kwargs)


def _operands(value: Plain) -> Iterator[int | str]:
    if isinstance(value, list):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, dict):
        yield from (content for key, content in value.items() if key in ("op", "of"))


def _renumbered(value: Plain, new: Mapping[int, int]) -> Plain:
    if isinstance(value, list):
        return [_renumbered(item, new) for item in value]
    return {"op": new[value["op"]]} if isinstance(value, dict) and "op" in value else value


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
        result: list[list[int]] = [[] for _ in self.operations]
        for number, operation in enumerate(self.operations):
            for used in dict.fromkeys(operation.inputs):
                result[used].append(number)
        return tuple(map(tuple, result))

    @cached_property
    def requires_grad(self) -> tuple[bool, ...]:
        """Per operation, whether a gradient flows through its result to a trained parameter."""
        result: list[bool] = []
        for operation in self.operations:
            reads = any(result[i] for i in operation.inputs) or any(
                self.sources[name].requires_grad for name in operation.sources
            )
            floating = operation.type is None or operation.type.floating
            result.append(reads and floating and operation.target not in DETACHED)
        return tuple(result)

    @cached_property
    def linear_head(self) -> tuple[int, ...]:
        """The operations of a linear head: its product, and what works on every logit by itself; () if there is none.

        >>> y = Operation("y", "aten.linear.default", ({"of": "input"}, {"of": "parameter"}))
        >>> bound = Operation("z", "aten.tanh.default", ({"op": 0},))
        >>> sources = {name: Source(name, TensorType((4, 4), "float32")) for name in ("input", "parameter")}
        >>> OperationGraph((y, bound), sources, {"logits": 1}).linear_head
        (0, 1)
        """
        found: list[int] = []
        number = next(iter(self.outputs.values())) if len(self.outputs) == 1 else None
        while number is not None and self.users[number] == tuple(found[:1]):
            operation = self.operations[number]
            found.insert(0, number)
            if operation.target == "aten.linear.default":
                parameters = {name for name, source in self.sources.items() if source.kind == "parameter"}
                return tuple(found) if set(operation.operands[1:]) <= parameters else ()
            scales = operation.target.startswith(SCALES) and len(operation.operands) == 1
            number = operation.inputs[0] if scales and operation.args[0] == {"op": operation.inputs[0]} else None
        return ()

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

    def type_of(self, operand: int | str) -> TensorType | None:
        """Return the type of an operation's result or of a source."""
        return self.operations[operand].type if isinstance(operand, int) else self.sources[operand].type

    def parameters_of(self, operations: Sequence[Operation]) -> tuple[str, ...]:
        """Return the parameters that these operations read, each once, in the order of first use."""
        read = (name for operation in operations for name in operation.sources)
        return tuple(dict.fromkeys(name for name in read if self.sources[name].kind == "parameter"))

    def check(self) -> None:
        """Check that operations read and return only what is there.

        Raises:
            ValueError: they do not.
        """
        for number, operation in enumerate(self.operations):
            if any(isinstance(o, int) and not 0 <= o < number for o in operation.operands):
                raise ValueError(f"{operation.name} reads a later operation")
            if missing := set(operation.sources) - self.sources.keys():
                raise ValueError(f"{operation.name} reads sources that do not exist ({sorted(missing)})")
        if not all(0 <= number < len(self.operations) for number in self.outputs.values()):
            raise ValueError("it returns operations that do not exist")

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Return the symbols' values for raw inputs of these shapes.

        Raises:
            RequestError: as ``dims.bind``.
        """
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


def needed(graph: OperationGraph) -> set[int]:
    """Return the operations that outputs and writes to buffers need, directly or indirectly."""
    keep: set[int] = set()
    todo = [*graph.outputs.values(), *(n for n, o in enumerate(graph.operations) if o.mutates)]
    while todo:
        number = todo.pop()
        if number not in keep:
            keep.add(number)
            todo.extend(graph.operations[number].inputs)
    return keep


def selected(graph: OperationGraph, order: Sequence[int]) -> OperationGraph:
    """Return a graph of these operations, in an order in which they can run, without sources that they do not read."""
    new = {old: position for position, old in enumerate(order)}
    operations = tuple(
        replace(
            operation,
            args=tuple(_renumbered(arg, new) for arg in operation.args),
            kwargs={name: _renumbered(arg, new) for name, arg in operation.kwargs.items()},
        )
        for operation in (graph.operations[n] for n in order)
    )
    read = {name for operation in operations for name in operation.sources}
    return replace(
        graph,
        operations=operations,
        sources={n: s for n, s in graph.sources.items() if n in read or s.kind in ("parameter", "input")},
        outputs={name: new[number] for name, number in graph.outputs.items()},
    )
