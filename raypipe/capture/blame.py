"""Find the module and the line that stopped the capture, and the reason, from the exporter's exception."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import nn

from raypipe.errors import CaptureError

OWN = str(Path(__file__).parent)
"""The code that captures, which is not to blame."""


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
    return isinstance(error, torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode)


def _reason(error: BaseException) -> str:
    if _on_values(error):
        return "what is done here depends on the values of a tensor"
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip() or type(error).__name__


def _fix(error: BaseException) -> str:
    if _on_values(error):
        return "use torch.where in place of a branch, or move these lines to a module of their own: it runs as it is"
    return "use torch operations here, or move these lines to a module of their own: it runs as it is"
