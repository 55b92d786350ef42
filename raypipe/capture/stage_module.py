"""Run operations of a captured model: as a module, or one result alone."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from raypipe.capture.captured import Captured
from raypipe.capture.meta import build_without_memory
from raypipe.capture.opaque import HOOKS, TARGET, WHOLE, arguments, flat_results, keeps_tensors_alone
from raypipe.errors import CaptureError
from raypipe.graph.liveness import inputs_read, runs_in
from raypipe.graph.operations import Operation, OperationGraph, Plain
from raypipe.tensor.experts import ExpertsParallel

AS_IT_IS = "_as_it_is"
"""Path of the module that calls a whole model, where that cannot be captured."""


_OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv", "eq", "ne", "lt", "le", "gt", "ge")
PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{n}": getattr(operator, n) for n in ("getitem", *_OPERATORS)},
    **{f"torch.{n}": getattr(torch, n) for n in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not", "sym_ite")},
    **{f"math.{n}": getattr(math, n) for n in ("ceil", "floor", "trunc")},
}
"""The functions besides torch's operators that a graph may call: arithmetic on sizes, and indexing."""


def resolve(target: str) -> Callable[..., Any]:
    """Return the function that a target's name denotes.

    Raises:
        CaptureError: the operator is not registered in this process.
    """
    if target in PYTHON_FUNCTIONS:
        return PYTHON_FUNCTIONS[target]
    library, name, overload = target.split(".")
    try:
        result: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), name), overload)
    except AttributeError:
        why, fix = "this operator is not registered with torch", "import the package that registers it"
        raise CaptureError(target, why, fix) from None
    return result


def decoded(operation: Operation, operands: Mapping[int | str, Any], device: torch.device | str) -> Any:
    """Return the positional and keyword arguments of an operation.

    ``operands`` holds results by operation and sources by name; ``device`` is where new tensors are made.
    """

    def decode(value: Plain) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((key, content),) = value.items()
        if key in ("op", "of"):
            return operands[content]
        if key == "float":
            return float(content)
        return torch.device(device) if key == "device" else getattr(torch, content)

    return tuple(map(decode, operation.args)), {name: decode(value) for name, value in operation.kwargs.items()}


def compute(
    graph: OperationGraph,
    wanted: int,
    given: Callable[[int | str], Any],
    allowed: Callable[[Operation, Sequence[Any]], bool] = lambda *_: True,
) -> Any:
    """Compute the result of one operation on the CPU, and forget every other as soon as it has been read.

    Args:
        graph: the model.
        wanted: number of the operation.
        given: returns the value of a source, or of an operation that is not to be computed; None of any other.
        allowed: returns whether an operation may run on these positional arguments; if one may not, the result is None.
    """
    known: dict[int | str, Any] = {}
    order: set[int] = set()
    todo: list[int | str] = [wanted]
    while todo:
        operand = todo.pop()
        if operand in known or operand in order:
            continue
        value = given(operand)
        if value is not None:
            known[operand] = value
        elif isinstance(operand, int):
            order.add(operand)
            todo.extend(graph.operations[operand].operands)
    last = {operand: number for number in sorted(order) for operand in graph.operations[number].operands}
    with torch.no_grad(), torch.device("cpu"):
        for number in sorted(order):
            operation = graph.operations[number]
            args, kwargs = decoded(operation, known, "cpu")
            if not allowed(operation, args):
                return None
            known[number] = resolve(operation.target)(*args, **kwargs)
            for operand in set(operation.operands):
                if last[operand] == number:
                    del known[operand]
    return known[wanted]


@dataclass(frozen=True)
class Subgraph:
    """Operations of a model as a module."""

    module: fx.GraphModule
    """Called with ``arrives`` and then ``inputs``; returns the tuple ``leaves``. Its parameters are on the meta device
    and have the names they have in the model; a tied one has its owner's."""
    arrives: tuple[Operation, ...]
    """Operations whose results it receives."""
    inputs: tuple[str, ...]
    """Raw inputs of the model that it reads."""
    leaves: tuple[Operation, ...]
    """Operations whose results it sends on; at the model's end, those the model returns."""


def build_subgraph(
    captured: Captured,
    span: Sequence[int],
    arriving: Sequence[int],
    leaving: Sequence[int],
    device: torch.device | str = "cpu",
    whole: Callable[[], nn.Module] | None = None,
) -> Subgraph:
    """Build the module of the operations ``span``; only copies of the buffers that they read are allocated.

    Tensors that arrive only for later stages are passed through. Cheap operations that each stage repeats are included.

    Args:
        captured: the model.
        span: numbers of the operations, in order.
        arriving: operations before whose results it receives, in that order.
        leaving: operations whose results it sends on, in that order; with the model's last operation it gives what the
            model returns instead.
        device: where the graph makes new tensors, and where the buffers are.
        whole: constructs the model; it is called only if there are opaque modules.

    Raises:
        CaptureError: there is an opaque module, and no ``whole``.
    """
    graph = captured.graph
    if len(graph.operations) - 1 in span:
        leaving = tuple(graph.outputs.values())
    order = runs_in(graph, span)
    operations = [graph.operations[n] for n in order]

    root = nn.Module()
    made = fx.Graph()
    nodes: dict[int | str, fx.Node] = {n: made.placeholder(graph.operations[n].name) for n in arriving}
    read = list(dict.fromkeys(name for operation in operations for name in operation.sources))
    opaque_calls = [operation for operation in operations if operation.target == TARGET]
    in_opaque = _hold_opaque(root, opaque_calls, whole, torch.device(device))
    inputs = inputs_read(graph, span)
    nodes |= {name: made.placeholder(name) for name in inputs}
    for name in read:
        if name not in inputs and name not in in_opaque:
            _hold(root, name, captured, torch.device(device))
            nodes[name] = made.get_attr(name)
    for number, operation in zip(order, operations, strict=True):
        if operation.target == TARGET:
            nodes[number] = _call_opaque(made, operation, nodes)
            continue
        args, kwargs = decoded(operation, nodes, device)
        nodes[number] = made.create_node("call_function", resolve(operation.target), args, kwargs, operation.name)
    made.output(tuple(nodes[n] for n in leaving))
    module = fx.GraphModule(root, made)
    if WHOLE in (call.args[0] for call in opaque_calls):
        _adopt(module, root.get_submodule(AS_IT_IS))
    return Subgraph(
        module,
        tuple(graph.operations[n] for n in arriving),
        inputs,
        tuple(graph.operations[n] for n in leaving),
    )


def _hold_opaque(
    root: nn.Module, calls: Sequence[Operation], whole: Callable[[], nn.Module] | None, device: torch.device
) -> set[str]:
    """Add the opaque modules that are called to ``root`` at their paths; return the names of their parameters."""
    names: set[str] = set()
    model: nn.Module | None = None
    for path in dict.fromkeys(call.args[0] for call in calls):
        if whole is None:
            raise CaptureError(f"module {path}", "is opaque, and there is no way to construct it", "give whole=")
        model = build_without_memory(whole) if model is None else model
        part = model.get_submodule(path)
        for buffer in part.buffers():
            buffer.data = buffer.data.to(device)
        parent, _, leaf = path.rpartition(".")
        _container(root, parent).add_module(leaf or AS_IT_IS, part if path != WHOLE else _AsItIs(part))
        names |= {f"{path}.{name}".removeprefix(".") for name, _ in part.named_parameters()}
    return names


class _AsItIs(nn.Module):
    """Calls the whole model, whose parameters the graph holds under the model's own names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = (model,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.held[0](*args, **kwargs)


def _adopt(module: fx.GraphModule, caller: nn.Module) -> None:
    """Give a graph's module the parameters and submodules of the whole model that it calls, under the same names."""
    assert isinstance(caller, _AsItIs)
    (model,) = caller.held
    for name, child in model.named_children():
        if hasattr(type(module), name):
            why = f'the model cannot be captured, and its submodule "{name}" has the name of an attribute of torch.fx'
            raise CaptureError(f"module {name}", why, "rename it")
        module.add_module(name, child)
    module.__dict__["_parameters"] = model._parameters
    module.__dict__["_buffers"] = model._buffers


def _call_opaque(made: fx.Graph, operation: Operation, nodes: Mapping[int | str, fx.Node]) -> fx.Node:
    (path, written, inputs), _ = decoded(
        replace(operation, args=operation.args[:3]), nodes, "cpu"
    )  # not its parameters
    args, kwargs = arguments(written, inputs)
    returned = made.create_node("call_module", path or AS_IT_IS, args, kwargs, f"{operation.name}_called")
    return made.create_node("call_function", flat_results, (returned, keeps_tensors_alone(written)), {}, operation.name)


def _container(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path, adding empty modules where there are none yet."""
    owner = root
    for name in path.split(".") if path else ():
        if name not in owner._modules:
            owner.add_module(name, nn.Module())
        owner = owner._modules[name]  # type: ignore[assignment]
    return owner


def _hold(root: nn.Module, name: str, captured: Captured, device: torch.device) -> None:
    """Register a parameter or buffer at its path."""
    parent, _, leaf = name.rpartition(".")
    owner = _container(root, parent)
    source = captured.graph.sources[name]
    if source.kind != "parameter":
        owner.register_buffer(leaf, captured.values[name].to(device, copy=True))
        return
    shape = [int(d) for d in source.type.shape]
    empty = torch.empty(shape, dtype=getattr(torch, source.type.dtype), device="meta")
    owner.register_parameter(leaf, nn.Parameter(empty, source.requires_grad))


# What the results of experts do not depend on, such as shared experts, is computed while tokens travel: half of it on
# their way there, the rest on the way back. Autograd runs the backward of operations in the opposite order of their
# forwards, so it lies between the start and the end of the gradients' ways too.
def compute_meanwhile(module: fx.GraphModule) -> None:
    """Move operations of a graph, in place, to where the tokens of its divided experts travel.

    Those move that an experts module neither reads nor is read by: shared experts and their gates.
    """
    parts, sizes = dict(module.named_modules()), {name: p.numel() for name, p in module.named_parameters()}
    for node in list(module.graph.nodes):
        experts = parts.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(experts, ExpertsParallel) or any(experts.__dict__[hooks] for hooks in HOOKS):
            continue
        beside = _independent(node)
        read = [sum(sizes.get(str(x.target), 0) for x in one.all_input_nodes if x.op == "get_attr") for one in beside]
        if not any(read) or any(one.op == "call_module" or one.is_impure() for one in beside):
            continue
        half = next(n for n in range(len(beside)) if 2 * sum(read[: n + 1]) >= sum(read)) + 1
        with module.graph.inserting_before(node):
            own = module.graph.create_node("get_attr", str(node.target))
            sent = module.graph.call_method("dispatch", (own, *node.args), node.kwargs)
            made = module.graph.call_method("compute", (own, sent))
            back = module.graph.call_method("combine", (own, made))
        for one in beside[:half]:
            made.prepend(one)
        for one in beside[half:]:
            back.prepend(one)
        node.replace_all_uses_with(back)
        module.graph.erase_node(node)
    module.recompile()


def _independent(call: fx.Node) -> list[fx.Node]:
    """Return the operations that a call neither reads nor is read by, in order."""
    before, after = {call}, {call}
    for node in reversed(call.graph.nodes):
        if not before.isdisjoint(node.users):
            before.add(node)
    for node in call.graph.nodes:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    fixed = ("placeholder", "get_attr", "output")
    return [node for node in call.graph.nodes if node not in before | after and node.op not in fixed]
