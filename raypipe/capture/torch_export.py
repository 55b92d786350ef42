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
from raypipe.compat.torch_private import FakeTensorMode, GuardOnDataDependentSymNode, ShapeEnv
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
        if any(_writes(node) or _mapped(node) for graph in _graphs(program.graph_module) for node in graph.nodes):
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
