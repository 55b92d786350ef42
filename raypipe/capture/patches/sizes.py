"""Sizes of a traced model's tensors stay symbolic where plain Python would make numbers of them.

``len(x)`` is a number in Python, and so is ``torch.div`` of two sizes a tensor. While a model is traced they are the
symbolic sizes that ``x.shape[0]`` and ``//`` give. What cannot do without knowing how many samples a micro-batch has,
such as a loop over them, stops the capture at that line; its module then runs as it is.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

SIZE = (int, torch.SymInt)


class FixedSamplesError(Exception):
    """A model's code would fit micro-batches of one size only."""

    def __init__(self) -> None:
        super().__init__("what is done here needs to know how many samples a micro-batch has")


@contextmanager
def symbolic_sizes() -> Iterator[None]:
    """Keep sizes symbolic inside the block, and stop where the number of samples would become fixed."""
    length, divide, fix = builtins.len, torch.div, ShapeEnv._set_replacement

    def symbolic_len(x: Any, /) -> Any:
        if isinstance(x, Tensor) and x.dim() and isinstance(x.shape[0], torch.SymInt):
            return x.shape[0]
        return length(x)

    def div(a: Any, b: Any, *args: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
        if isinstance(a, SIZE) and isinstance(b, SIZE) and rounding_mode in ("trunc", "floor"):
            return a // b if rounding_mode == "floor" or _same_sign(a, b) else math.trunc(a / b)
        return divide(a, b, *args, rounding_mode=rounding_mode, **kwargs)

    def watched(env: ShapeEnv, symbol: Any, by: Any, *args: Any) -> None:
        if by.is_number and any(name.endswith("size()[0]") for name in _sources(env, symbol)):
            raise FixedSamplesError
        fix(env, symbol, by, *args)

    builtins.len, torch.div = symbolic_len, div  # type: ignore[assignment]
    ShapeEnv._set_replacement = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        builtins.len, torch.div = length, divide
        ShapeEnv._set_replacement = fix  # type: ignore[method-assign]


def _same_sign(a: Any, b: Any) -> bool:
    return isinstance(a, torch.SymInt) or (a >= 0) == (b > 0)


def _sources(env: ShapeEnv, symbol: Any) -> list[str]:
    """Return where a symbol's value comes from: ``L['x'].size()[0]`` of an input."""
    found = getattr(env, "var_to_sources", {}).get(symbol, ())
    return [source.name() if callable(source.name) else str(source.name) for source in found]
