"""Capture a whole, unmodified module as operations, without the memory of its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raypipe.capture.blame import StoppedError, blame
from raypipe.capture.encode import encode
from raypipe.capture.meta import tied_names
from raypipe.capture.torch_export import export
from raypipe.errors import CaptureError, nearest
from raypipe.graph.calls import Call
from raypipe.graph.captured_files import Notify, to_stderr
from raypipe.graph.operations import OperationGraph


@dataclass(frozen=True)
class Captured:
    """A model's forward as data: enough to plan with, and to build any run of its operations."""

    graph: OperationGraph
    calls: tuple[Call, ...]
    """Per operation, its arguments as plain data."""
    values: Mapping[str, Tensor]
    """Buffers and constants that the operations read, as they are at the start."""


def capture(
    module: nn.Module,
    inputs: Mapping[str, object],
    *,
    outputs: Sequence[str] | None = None,
    dynamic: Mapping[str, tuple[int, ...]] | None = None,
    notify: Notify = to_stderr,
) -> Captured:
    """Capture the forward of a module on example inputs, in the mode (training or not) that it is in.

    Parameters may be meta tensors (``empty.build_without_memory``); no memory is used for them. ``inputs`` are the
    forward's arguments by name; tensors need a batch of two or more, plain values are fixed for good. ``outputs`` names
    the results that are wanted, all of them by default: keys of a mapping or fields of a structure; "0", "1", ... in a
    tuple; "output" if there is but one. ``dynamic`` says which dimensions of which inputs may differ at run time; by
    default the first of each, and the second of whole-number inputs (tokens).

    The dtypes of the parameters are part of what is captured: a model is captured in the precision it runs in.

    A module inside the model whose forward cannot be captured becomes one operation, and ``notify`` is told so.

    Raises:
        CaptureError: the model cannot be captured, naming the module, the file, the line and what stopped it there.
    """
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if dynamic is None:
        dynamic = {
            n: (0, 1) if t.dim() > 1 and not t.is_floating_point() else (0,) for n, t in tensors.items() if t.dim()
        }
    ties = tied_names(module)
    classes = {path: f"{type(part).__module__}.{type(part).__qualname__}" for path, part in module.named_modules()}
    opaque: list[str] = []
    while True:
        try:
            program = export(module, inputs, dynamic, opaque)
            encoded = encode(program, ties, _wanted(program, outputs), classes)
            break
        except CaptureError:
            raise
        except Exception as error:  # whatever a model's own code may raise when it is traced
            found = error.blame if isinstance(error, StoppedError) else blame(module, error)
            alike = _alike(module, found.module)
            if not found.module or any(
                path == done or path.startswith(f"{done}.") for path in alike for done in opaque
            ):
                raise found.error from error
            notify(f"{_listed(alike)} as it is, for it cannot be captured: {found.error.where}: {found.error.why}")
            opaque = [done for done in opaque if not any(done.startswith(f"{path}.") for path in alike)] + alike
    _check_ties(ties, opaque)
    values = {}
    held = dict(module.named_buffers()) | {k: v for k, v in program.constants.items() if isinstance(v, Tensor)}
    for name, source in encoded.graph.sources.items():
        if source.kind in ("buffer", "constant"):
            values[name] = _real(name, held)
    return Captured(encoded.graph, encoded.calls, values)


def _alike(module: nn.Module, path: str) -> list[str]:
    """The modules of the same class as the one at a path, in the same place of every repeated block."""
    kind, place = type(module.get_submodule(path)), re.sub(r"\d+", "0", path)
    return [p for p, part in module.named_modules() if type(part) is kind and re.sub(r"\d+", "0", p) == place]


def _listed(paths: Sequence[str]) -> str:
    return f"module {paths[0]} runs" if len(paths) == 1 else f"each of {paths[0]} .. {paths[-1]} runs"


def _check_ties(ties: Sequence[tuple[str, ...]], opaque: Sequence[str]) -> None:
    """An opaque module holds its parameters itself, so none of them can be another module's."""
    for path in opaque:
        for group in ties:
            inside = [name for name in group if name.startswith(f"{path}.")]
            if inside and len(inside) < len(group):
                other = next(name for name in group if name not in inside)
                raise CaptureError(
                    f"module {path}", f"cannot be captured, and shares {inside[0]} with {other}", "untie them"
                )


def _real(name: str, held: Mapping[str, Tensor]) -> Tensor:
    value = held[name]
    if value.is_meta or isinstance(value, torch._subclasses.FakeTensor):
        why = "this buffer has no value, because it was computed from a parameter or from uninitialised memory"
        raise CaptureError(name, why, "give the buffer its value in the constructor")
    return value.detach().clone()


def _wanted(program: Any, outputs: Sequence[str] | None) -> dict[str, int]:
    """Positions of the wanted results among all that the program returns."""
    names = _output_names(program)
    found = {name: position for position, name in enumerate(names) if name}
    if outputs is None:
        return found
    for name in outputs:
        if name not in found:
            raise CaptureError(f"output {name}", "the model does not return it", nearest(name, found))
    return {name: found[name] for name in outputs}


def _output_names(program: Any) -> list[str]:
    """A name for each result; "" for those that are no tensors."""
    spec = program.call_spec.out_spec
    specs = [s for s in program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
    whole = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(whole)
    names = [
        "_".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path) for path, _ in paths
    ]
    is_tensor = [type(s.arg).__name__ == "TensorArgument" for s in specs]
    return [(name or "output") if good else "" for name, good in zip(names, is_tensor, strict=True)]
