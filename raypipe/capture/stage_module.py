"""Build a module that runs some operations of a captured model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from raypipe.capture.captured import Captured
from raypipe.capture.decode import decode, resolve
from raypipe.capture.meta import build_without_memory
from raypipe.capture.opaque import TARGET, WHOLE, arguments, flat_results, keeps_tensors_alone
from raypipe.errors import CaptureError
from raypipe.graph.calls import Call
from raypipe.graph.liveness import inputs_read, runs_in
from raypipe.graph.operations import Operation

AS_IT_IS = "_as_it_is"
"""Path of the module that calls a whole model, where that cannot be captured."""


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
    opaque_calls = [captured.calls[n] for n, o in zip(order, operations, strict=True) if o.target == TARGET]
    in_opaque = _hold_opaque(root, opaque_calls, whole, torch.device(device))
    inputs = inputs_read(graph, span)
    nodes |= {name: made.placeholder(name) for name in inputs}
    for name in read:
        if name not in inputs and name not in in_opaque:
            _hold(root, name, captured, torch.device(device))
            nodes[name] = made.get_attr(name)
    for number, operation in zip(order, operations, strict=True):
        call = captured.calls[number]
        if operation.target == TARGET:
            nodes[number] = _call_opaque(made, call, nodes, operation.name)
            continue
        args = tuple(decode(arg, nodes, device) for arg in call.args)
        kwargs = {key: decode(arg, nodes, device) for key, arg in call.kwargs.items()}
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
    root: nn.Module, calls: Sequence[Call], whole: Callable[[], nn.Module] | None, device: torch.device
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


def _call_opaque(made: fx.Graph, call: Call, nodes: dict[int | str, fx.Node], name: str) -> fx.Node:
    path, written, inputs, _ = call.args
    args, kwargs = arguments(written, [decode(item, nodes, "cpu") for item in inputs])
    returned = made.create_node("call_module", path or AS_IT_IS, args, kwargs, f"{name}_called")
    return made.create_node("call_function", flat_results, (returned, keeps_tensors_alone(written)), {}, name)


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
