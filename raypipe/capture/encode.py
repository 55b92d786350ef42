"""Encode an exported program as operations in plain data, with names resolved and side effects stated.

These rewrites change no value: assertions, conversions to the dtype and device that a tensor already has, and inactive
dropout are dropped; the functional variants of dropout and batch norm become the usual operations again; no-grad
regions are inlined, and their results detached.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from raypipe.capture.opaque import TARGET as OPAQUE
from raypipe.capture.stage_module import PYTHON_FUNCTIONS, resolve
from raypipe.capture.torch_export import Blame, StoppedError
from raypipe.compat.torch_private import HigherOrderOperator, OpOverload
from raypipe.errors import CaptureError
from raypipe.graph.dims import Dim
from raypipe.graph.operations import (
    ATTENTION,
    GETITEM,
    Operation,
    OperationGraph,
    Plain,
    Source,
    TensorType,
    needed,
    selected,
)

_PYTHON_NAMES = {function: name for name, function in PYTHON_FUNCTIONS.items()}
_CHECKS = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten._assert_async.msg"}
_CHECKS |= {"aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"}
_CONVERSIONS = {"aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten.to.prim_Device"}
_COPIES_OF_CONSTANTS = {"aten.lift_fresh_copy.default", "aten.lift_fresh.default"}
_VIEWS = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""Views become reshapes, because a view depends on strides, which may differ from those of the capture's kernels."""
_DROPOUT = "aten.dropout.default"
_BATCH_NORM = "aten.batch_norm.default"


_RECURRENT = {f"aten.{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")}
"""Operations that torch marks as drawing random numbers, although they do so only with dropout."""


def encode(
    program: ExportedProgram, tied: Sequence[tuple[str, ...]], outputs: Mapping[str, int], classes: Mapping[str, str]
) -> OperationGraph:
    """Encode a program as operations.

    Args:
        program: the exported program.
        tied: groups of names of tied parameters.
        outputs: per wanted output, its position among the program's results.
        classes: class of each module by path.

    Raises:
        StoppedError: an operation cannot be encoded.
        CaptureError: an output is not a tensor that the model computes.
    """
    encoder = _Encoder(program, tied, classes)
    encoder.returned = encoder.walk(program.graph, {})
    return encoder.finish(outputs)


@dataclass
class _Encoder:
    program: ExportedProgram
    tied: Sequence[tuple[str, ...]]
    classes: Mapping[str, str]
    operations: list[Operation] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    tracked: list[bool] = field(default_factory=list)
    """Per operation, whether a gradient may flow through it."""
    values: dict[fx.Node, Plain] = field(default_factory=dict)
    """Encoded value of each node, as used in calls: an operand, a plain value, or a list of these."""
    symbols: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Raw input and dimension from which each symbolic size can be read."""
    example: dict[str, int] = field(default_factory=dict)
    returned: list[Plain] = field(default_factory=list)

    # ---- reading the program

    def walk(self, graph: fx.Graph, given: Mapping[str, Plain]) -> list[Plain]:
        """Emit a graph's operations and return its outputs; ``given`` holds the placeholders of a region's body."""
        for node in graph.nodes:
            if node.op == "placeholder":
                self.values[node] = given[node.name] if node.name in given else self.source(node)
            elif node.op == "call_function":
                self.values[node] = self.call(node)
            elif node.op == "output":
                results = node.args[0]
                return [self.values[r] if isinstance(r, fx.Node) else r for r in results]
        return []

    def source(self, node: fx.Node) -> Plain:
        spec = next(s for s in self.program.graph_signature.input_specs if s.arg.name == node.name)
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return getattr(spec.arg, "value", None)
        kinds = {
            InputKind.PARAMETER: "parameter",
            InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant",
            InputKind.USER_INPUT: "input",
        }
        if spec.kind not in kinds:
            _stop(node, f"reads {spec.kind.name.lower()}, which is not a tensor", "pass tensors instead")
        kind = kinds[spec.kind]
        name = str(spec.target or node.name)
        if kind == "parameter":
            name = next((group[0] for group in self.tied if name in group), name)
        shape = tuple(self.dim(d) for d in value.shape)
        if kind == "input":
            for d, size in enumerate(shape):
                if isinstance(size, str) and size.isidentifier():
                    self.symbols.setdefault(size, (name, d))
                    given = value.shape[d]
                    self.example[size] = given if isinstance(given, int) else int(given.node.hint)
        wanted = kind == "parameter" and bool(value.requires_grad)
        self.sources[name] = Source(kind, TensorType(shape, _word(value.dtype)), wanted)
        return {"of": name}

    # ---- one call

    def call(self, node: fx.Node) -> Plain:
        target = node.target
        if target is operator.getitem:
            return self.item(node)
        if isinstance(target, HigherOrderOperator):
            return self.region(node)
        name = _PYTHON_NAMES.get(target) or _operator_name(target)  # type: ignore[arg-type]
        if name is None:
            _stop(node, f"calls {target}, which is not a torch operator", "register it with torch.library")
        if name in _CHECKS:
            return None
        value = node.meta.get("val")
        if isinstance(value, bool | int | float) and not isinstance(value, torch.SymInt):
            return value
        if name == "aten.sym_size.int" and isinstance(value, torch.SymInt) and str(value.node.expr) in self.symbols:
            source, d = self.symbols[str(value.node.expr)]
            return self.emit(node, name, [{"of": source}, d], {}, None)
        args = [self.plain(arg, node) for arg in node.args]
        kwargs = {key: self.plain(arg, node) for key, arg in node.kwargs.items()}
        if self.changes_nothing(name, node, args):
            return args[0]
        if name == "aten.native_dropout.default":
            return [self.emit(node, _DROPOUT, args, {}, self.type(_items(value)[0])), None]
        if name == "aten._native_batch_norm_legit_functional.default":
            out = self.emit(node, _BATCH_NORM, [*args, False], {}, self.type(_items(value)[0]))
            return [out, None, None, {"updated": 3}, {"updated": 4}]
        if name == "aten.copy.default":
            return self.copied(node, args)
        if name == "aten.full.default" and isinstance(value, Tensor) and not _fits(args[1], value):
            fix = "give the tensor the dtype that the number is of, or train in float32"
            _stop(node, f"fills a tensor of {value.dtype} with {args[1]}, which is out of its range", fix)
        name = _VIEWS.get(name, name)
        return self.emit(node, name, args, kwargs, self.type(value) if isinstance(value, Tensor) else None)

    def changes_nothing(self, name: str, node: fx.Node, args: list[Plain]) -> bool:
        if name in _COPIES_OF_CONSTANTS:
            return True
        if name in (_DROPOUT, "aten.native_dropout.default", "aten.feature_dropout.default"):
            return args[1] == 0.0 or not args[2]
        if name in _CONVERSIONS:
            before, after = node.args[0], node.meta["val"]
            return isinstance(before, fx.Node) and before.meta["val"].dtype == after.dtype
        return False

    def copied(self, node: fx.Node, args: list[Plain]) -> Plain:
        """Emit what ``a.copy_(b)`` leaves in ``a``: b in a's shape and dtype. autograd does not know the operation."""
        into, value = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
        result = args[1]
        if value.dtype != into.dtype:
            kind = TensorType(tuple(self.dim(d) for d in value.shape), _word(into.dtype))
            result = self.emit(node, "aten.to.dtype", [result, {"dtype": _word(into.dtype)}], {}, kind, suffix="_cast")
        if value.shape != into.shape:
            result = self.emit(
                node, "aten.expand_as.default", [result, args[0]], {}, self.type(into), suffix="_expanded"
            )
        return result

    def item(self, node: fx.Node) -> Plain:
        whole, index = self.values[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(whole, list):
            return whole[index]  # type: ignore[index]
        value = node.meta.get("val")
        return self.emit(node, GETITEM, [whole, index], {}, self.type(value) if isinstance(value, Tensor) else None)

    def region(self, node: fx.Node) -> Plain:
        """Inline the body of a region with gradients switched on or off, or with autocast switched off."""
        kind = str(node.target)
        if kind == "wrap_with_set_grad_enabled":
            enabled, body, *operands = node.args
        elif kind == "wrap_with_autocast" and not node.args[2]:
            enabled, (body, *operands) = True, node.args[4:]
        else:
            fix = (
                "use plain tensor operations there" if kind != "wrap_with_autocast" else "leave autocast to train.dtype"
            )
            _stop(node, f"uses the region {kind}", fix)
        inner = getattr(node.graph.owning_module, str(body.target)).graph  # type: ignore[union-attr]
        names = [n.name for n in inner.nodes if n.op == "placeholder"]
        given = dict(zip(names, (self.plain(o, node) for o in operands), strict=True))
        result = self.walk(inner, given)
        return result if enabled else [self.detached(value, node) for value in result]

    def detached(self, value: Plain, node: fx.Node) -> Plain:
        if not (isinstance(value, dict) and "op" in value and self.tracked[value["op"]]):
            return value
        kind = self.operations[value["op"]].type
        return self.emit(node, "aten.detach.default", [value], {}, kind, suffix=f"_detached_{value['op']}")

    def emit(
        self,
        node: fx.Node,
        target: str,
        args: list[Plain],
        kwargs: dict[str, Plain],
        kind: TensorType | None,
        suffix: str = "",
    ) -> Plain:
        operation = Operation(
            name=node.name + suffix,
            target=target,
            args=tuple(args),
            kwargs=kwargs,
            type=kind,
            module=module_of(node),
            source=_place(node),
            mutates=_written(target, args),
        )
        self.operations.append(replace(operation, random=_draws(operation)))
        operands = operation.operands
        self.tracked.append(
            target != "aten.detach.default"
            and (kind is None or kind.floating)
            and any(self.tracked[o] if isinstance(o, int) else self.sources[o].requires_grad for o in operands)
        )
        return {"op": len(self.operations) - 1}

    # ---- values

    def plain(self, value: Any, node: fx.Node) -> Plain:
        if isinstance(value, fx.Node):
            result = self.values[value]
            if isinstance(result, dict) and "updated" in result:
                _stop(node, "reads running statistics that batch norm has just written", "read them before")
            return result
        if isinstance(value, list | tuple):
            return [self.plain(item, node) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        for kind, key in _WORDS.items():
            if isinstance(value, kind):
                return {key: _word(value)}
        if not isinstance(value, torch.device):
            _stop(node, f"has an argument of type {type(value).__name__}", "pass numbers, text or tensors")
        return {"device": value.type}

    def type(self, value: Tensor) -> TensorType:
        return TensorType(tuple(self.dim(d) for d in value.shape), _word(value.dtype))

    @staticmethod
    def dim(size: int | torch.SymInt) -> Dim:
        if isinstance(size, torch.SymInt):
            text = str(size.node.expr)
            return int(text) if text.lstrip("-").isdecimal() else text
        return int(size)

    # ---- the end

    def finish(self, outputs: Mapping[str, int]) -> OperationGraph:
        """Add the operations that write buffers, drop unused operations, and renumber."""
        returned: list[Plain] = []
        for spec, value in zip(self.program.graph_signature.output_specs, self.returned, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                returned.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION and "updated" not in value:
                self.write_back(str(spec.target), value)
        wanted: dict[str, int] = {}
        for name, position in outputs.items():
            value = returned[position]
            if not (isinstance(value, dict) and "op" in value):
                why = (
                    "it is an input or a constant, which the model does not compute"
                    if value is not None
                    else "it is None"
                )
                raise CaptureError(f"output {name}", why, "leave it out of the wanted outputs")
            wanted[name] = value["op"]
        graph = OperationGraph(
            operations=tuple(self.operations),
            sources=self.sources,
            outputs=wanted,
            tied=tuple(group for group in self.tied if len(group) > 1),
            classes=self.classes,
            example=self.example,
            at_least=self.at_least(),
        )
        return selected(graph, sorted(needed(graph), key=self.place))

    def write_back(self, buffer: str, value: Plain) -> None:
        """Append the operation that stores a buffer's new value; ``place`` puts it after all readers of the old one."""
        name, path = f"{buffer.replace('.', '_')}_updated", buffer.rpartition(".")[0]
        args, kind = ({"of": buffer}, value), self.sources[buffer].type
        self.operations.append(Operation(name, "aten.copy_.default", args, type=kind, module=path, mutates=(buffer,)))

    def at_least(self) -> dict[str, int]:
        """Return the lower bounds of symbolic sizes that the traced branches require.

        The exporter's own bound of 2 for every symbol is left out, because nothing requires it.
        """
        ranges = {str(symbol): result.lower for symbol, result in self.program.range_constraints.items()}
        return {name: int(ranges[name]) for name in self.example if name in ranges and ranges[name] > 2}

    def place(self, number: int) -> tuple[int, int]:
        """Return an operation's sort key: buffer writes go after the last reader of the old value."""
        operation = self.operations[number]
        if operation.target == "aten.copy_.default" and operation.mutates:
            readers = (n for n, o in enumerate(self.operations) if operation.mutates[0] in o.sources and n != number)
            return max([*readers, *operation.inputs]), 1
        return number, 0


def _draws(operation: Operation) -> bool:
    """Return whether a call draws random numbers; attention without dropout does not, although torch marks it so."""
    target, args = operation.target, operation.args
    if target == ATTENTION:
        return bool(operation.argument(4, "dropout_p", 0.0))
    if target == OPAQUE:
        return bool(json.loads(args[1])["draws"])
    if target in _RECURRENT:
        _, layers, dropout, train = args[-6:-2] if target.endswith("input") else args[-5:-1]
        return bool(dropout and train and layers > 1)
    if target == "aten.rrelu.default":
        return len(args) > 3 and bool(args[3])
    called = resolve(target)
    return isinstance(called, OpOverload) and torch.Tag.nondeterministic_seeded in called.tags


def _written(target: str, args: Sequence[Plain]) -> tuple[str, ...]:
    """Return the buffers that a call writes."""
    if target == _BATCH_NORM:
        return tuple(arg["of"] for arg in args[3:5] if arg is not None) if args[5] else ()
    schema = getattr(resolve(target), "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    declared = zip(args, schema.arguments, strict=False)
    return tuple(a["of"] for a, d in declared if d.alias_info is not None and d.alias_info.is_write and "of" in a)


def _operator_name(target: object) -> str | None:
    if not isinstance(target, OpOverload):
        return None
    return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"


_WORDS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}


def _word(value: object) -> str:
    """Return ``float32`` for ``torch.float32``, and so on."""
    return str(value).removeprefix("torch.")


def _fits(number: Plain, made: Tensor) -> bool:
    """Return whether a number is in the range of a tensor's dtype; ``full`` runs with no other."""
    return not (isinstance(number, float) and made.is_floating_point() and abs(number) > torch.finfo(made.dtype).max)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _place(node: fx.Node) -> str:
    """Return ``file:line`` of the innermost line of the model's code, skipping torch's own."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return ":".join(own[-1]) if own else ""


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that called a node."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    unknown = "_empty_nn_module_stack_from_metadata_hook"
    return next((path for path, kind in reversed(list(stack.values())) if kind != unknown), "")


def _stop(node: fx.Node, why: str, fix: str) -> NoReturn:
    path = module_of(node)
    where = ", ".join(part for part in (f"operation {node.name}", path and f"module {path}", _place(node)) if part)
    raise StoppedError(Blame(path, CaptureError(where, why, fix)))
