"""Modules that are cast to another precision in a forward, as the routers of Switch Transformers are.

Casting a module replaces its parameters for good, which an exported graph cannot do. While a model is traced, such a
module computes with cast copies of its parameters instead; they themselves keep the precision that the job asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def module_casts() -> Iterator[None]:
    """Make ``module.to(dtype)`` a cast of copies inside the block."""
    plain = nn.Module.to
    forwards: list[tuple[nn.Module, Any]] = []

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        floating = {name: t for name, t in values.items() if t.is_floating_point()}
        if dtype is None or all(t.dtype == dtype for t in floating.values()):
            return module
        own = module.__dict__.get("forward")
        forwards.append((module, own))

        def forward(*inputs: Any, **named: Any) -> Any:
            cast = {name: t.to(dtype) for name, t in floating.items()}
            _put(module, own)
            try:
                return torch.func.functional_call(module, cast, inputs, named)
            finally:
                module.__dict__["forward"] = forward

        module.__dict__["forward"] = forward
        return module

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = plain  # type: ignore[method-assign]
        for module, own in reversed(forwards):
            _put(module, own)


def _put(module: nn.Module, forward: Any) -> None:
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward
