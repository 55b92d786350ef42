"""Decode the functions and arguments of captured operations from plain data (``graph/calls.py``)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from raypipe.errors import CaptureError
from raypipe.graph.calls import Plain

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
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), name), overload)
    except AttributeError:
        why, fix = "this operator is not registered with torch", "import the package that registers it"
        raise CaptureError(target, why, fix) from None
    return found


def decode(value: Plain, operands: Mapping[int | str, Any], device: torch.device | str) -> Any:
    """Return an argument; ``operands`` holds results by operation and sources by name."""
    if isinstance(value, list):
        return [decode(item, operands, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((key, content),) = value.items()
    if key in ("op", "of"):
        return operands[content]
    if key == "float":
        return float(content)
    if key == "device":
        return torch.device(device)
    return getattr(torch, content)
