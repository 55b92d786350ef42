"""Run ``torch.export`` on a module with fake tensors, to get a flat graph of ATen operations without side effects."""

from __future__ import annotations

import functools
import linecache
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from raypipe.capture.opaque import as_plain, opaque_modules
from raypipe.capture.tracing import fake_parameters, traced, without_stand_ins
from raypipe.compat.torch_private import (
    DispatchKey,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    OpOverload,
    ShapeEnv,
)
from raypipe.errors import CaptureError

OWN = str(Path(__file__).parent)
"""The code that captures, which is not to blame."""


def export(
    module: nn.Module,
    inputs: Mapping[str, object],
    dynamic: Mapping[str, tuple[int, ...]],
    opaque: Sequence[str] = (),
    listed: list[str] | None = None,
    rows: Mapping[str, Tensor] | None = None,
) -> ExportedProgram:
    """Export a module in its current mode, training or evaluation.

    Its parameters may be on the meta device. In-place operations are replaced by out-of-place ones, so that a tensor
    does not change after a stage has sent it.

    Args:
        module: the model.
        inputs: the forward's arguments by name, tensors or plain values.
        dynamic: per input, the dimensions that may differ at run time.
        opaque: paths of submodules that are not traced.
        listed: gets an entry for each list of the batch's samples, which then holds stand-ins (``tracing.traced``);
            without it, such a list fixes the number of samples.
        rows: rows of the data by the forward's arguments, on which an opaque whole model is tried.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    samples = next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 0)
    with (
        opaque_modules(module, opaque, rows),
        _plain_outputs(module),
        fake_parameters(module, fake),
        traced(samples, listed),
        _quiet(),
    ):
        arguments = {
            k: fake.from_tensor(v, static_shapes=True) if isinstance(v, Tensor) else v for k, v in inputs.items()
        }
        shapes = {
            name: {d: Dim.AUTO for d in dynamic.get(name, ())} if isinstance(value, Tensor) else None
            for name, value in inputs.items()
        }
        program = torch.export.export(module, (), arguments, dynamic_shapes=shapes, strict=False)
        if not all(_out_of_place(graph) for graph in _graphs(program.graph_module)):
            program = program.run_decompositions({})
    return program


@contextmanager
def _plain_outputs(module: nn.Module) -> Iterator[None]:
    """Make a forward return a dict where it returns a structure that torch's pytrees do not know (diffusers')."""
    forward, own = module.forward, "forward" in module.__dict__

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return without_stand_ins(as_plain(forward(*args, **kwargs)))

    module.forward = plain
    try:
        yield
    finally:
        if own:
            module.forward = forward
        else:
            del module.forward


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings and logs, which are for its own developers; its errors are exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _writes(node: fx.Node) -> bool:
    """Return whether a node writes in place to an operand that is not a buffer of the model."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return False
    return not all(
        isinstance(arg, fx.Node) and arg.op == "placeholder" and arg.name.startswith("b_")
        for arg, declared in zip(node.args, schema.arguments, strict=False)
        if declared.alias_info is not None and declared.alias_info.is_write
    )


def _mapped(node: fx.Node) -> bool:
    """Return whether a node belongs to ``torch.vmap``; the decomposition replaces these by batched operations."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "torch._functorch.predispatch"


def _out_of_place(graph: fx.Graph) -> bool:
    """Replace in-place operations by out-of-place ones where that takes no second trace; return whether none is left.

    ``ExportedProgram.run_decompositions`` does it for all of them, and traces the model twice more.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    return all([_rewritten(node, places) for node in places if _writes(node)]) and not any(map(_mapped, graph.nodes))


def _rewritten(node: fx.Node, places: Mapping[fx.Node, int]) -> bool:
    """Make an operation that writes to a tensor of its own, or copies into a slice of one, return the whole result.

    Returns:
        Whether it could be told that nothing else reads what it writes through another tensor.
    """
    written, schema = node.args[0], node.target._schema  # type: ignore[union-attr]
    name = schema.name.removeprefix("aten::")
    writes = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    if not isinstance(written, fx.Node) or not name.endswith("_") or sum(writes) > 1 or "::" in name:
        return False
    copied = name == "copy_" and written.target is torch.ops.aten.slice.Tensor
    base = written.args[0] if copied else written
    packet = torch.ops.aten.slice_scatter if copied else getattr(torch.ops.aten, name.removesuffix("_"), None)
    target = getattr(packet, "default" if copied else schema.overload_name or "default", None)
    if target is None or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if not isinstance(base, fx.Node) or not _owns(base) or (copied and (len(written.users) > 1 or node.users)):
        return False
    later = [user for user in base.users if places[user] > places[node]]
    others = [user for user in base.users if places[user] < places[node] and not (copied and user is written)]
    if any(user.op == "output" for user in later) or any(_read_after(one, places[node], places) for one in others):
        return False
    args, kwargs = ((base, node.args[1], *written.args[1:]), written.kwargs) if copied else (node.args, node.kwargs)
    if not _is_like(base.meta["val"], target, args, kwargs):
        return False
    if copied and not _like(written.meta["val"], node.args[1].meta["val"]):  # type: ignore[union-attr]
        return False
    node.target, node.args, node.kwargs, node.meta["val"] = target, args, kwargs, base.meta["val"]
    for user in later:
        user.replace_input_with(base, node)
    if copied:
        node.graph.erase_node(written)
    return True


def _is_like(value: Tensor, target: OpOverload, args: Any, kwargs: Any) -> bool:
    """Return whether a call has a result of this shape and dtype: in-place operations keep those, and cast."""
    given = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    with value.fake_mode:  # type: ignore[attr-defined]
        return _like(value, target(*given[0], **given[1]))


def _like(one: Tensor, other: Tensor) -> bool:
    return str(one.shape) == str(other.shape) and one.dtype == other.dtype


def _owns(node: fx.Node) -> bool:
    """Return whether the result is a tensor of its own, and no view of another or that tensor itself."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    composite = target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)  # may return its argument
    return not composite and all(one.alias_info is None for one in target._schema.returns)


def _read_after(node: fx.Node, place: int, places: Mapping[fx.Node, int]) -> bool:
    """Return whether what ``node`` reads may be read through its result after the operation at ``place``."""
    return not _owns(node) and any(places[user] > place or _read_after(user, place, places) for user in node.users)


def _graphs(module: fx.GraphModule) -> Iterator[fx.Graph]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield part.graph


# The module and the line that stopped the capture, and the reason, from the exporter's exception.


class Blame(NamedTuple):
    """Where and why the capture stopped."""

    module: str
    """Path of the innermost module that was being called; "" for the model itself."""
    error: CaptureError


class StoppedError(Exception):
    """Raised for an operation that cannot be encoded; ``capture`` then makes its module opaque."""

    def __init__(self, blame: Blame) -> None:
        super().__init__(blame)
        self.blame = blame


def blame(model: nn.Module, error: BaseException) -> Blame:
    """Find the innermost module and the innermost line outside torch in an error's traceback."""
    paths = {id(part): path for path, part in model.named_modules()}
    module, place, code = "", "", ""
    for frame, line in _frames(error.__traceback__):
        called = frame.f_locals.get("self")
        if isinstance(called, nn.Module) and id(called) in paths:
            module, place, code = paths[id(called)], "", ""
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(OWN):
            place, code = f"{name}:{line}", linecache.getline(name, line).strip()
    kind = type(model.get_submodule(module)).__name__
    where = ", ".join(part for part in (f"{kind} {module}".strip(), place) if part)
    return Blame(module, CaptureError(where, f"{_reason(error)}{code and f': {code}'}", _fix(error)))


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _on_values(error: BaseException) -> bool:
    return isinstance(error, GuardOnDataDependentSymNode)


def _reason(error: BaseException) -> str:
    if _on_values(error):
        return "what is done here depends on the values of a tensor"
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip() or type(error).__name__


def _fix(error: BaseException) -> str:
    if _on_values(error):
        return "use torch.where in place of a branch, or move these lines to a module of their own: it runs as it is"
    return "use torch operations here, or move these lines to a module of their own: it runs as it is"
