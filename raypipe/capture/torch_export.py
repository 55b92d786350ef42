"""Run ``torch.export`` on a module with fake tensors, to get a flat graph of ATen operations without side effects."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from raypipe.capture.opaque import opaque_modules
from raypipe.capture.patches import (
    fake_parameters,
    gradient_hooks,
    listed_samples,
    module_casts,
    own_backwards,
    symbolic_sizes,
    undecided_masks,
    whole_alpha_dropout,
    without_stand_ins,
)
from raypipe.capture.structures import as_plain


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
        listed: gets an entry for each list of the batch's samples, which then holds stand-ins (``listed_samples``);
            without it, such a list fixes the number of samples.
        rows: rows of the data by the forward's arguments, on which an opaque whole model is tried.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with (
        opaque_modules(module, opaque, rows),
        _plain_outputs(module),
        fake_parameters(module, fake),
        whole_alpha_dropout(),
        undecided_masks(),
        module_casts(),
        symbolic_sizes(),
        own_backwards(),
        gradient_hooks(),
        nullcontext() if listed is None else listed_samples(_samples(inputs), listed),
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


def _samples(inputs: Mapping[str, object]) -> int:
    return next((len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim()), 0)


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


def module_of(node: fx.Node) -> tuple[str, str]:
    """Return path and class of the innermost module that called a node."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    for path, kind in reversed(list(stack.values())):
        if kind != "_empty_nn_module_stack_from_metadata_hook":
            return path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return "", ""
