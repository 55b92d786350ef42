"""What a forward does to gradients beside its operations: hooks on tensors, on modules, and derivatives of its own.

The exporter records none of these, so a captured graph would train with other gradients. Where a traced model adds a
hook to a tensor, calls a module that has backward hooks, or asks autograd for a derivative, the capture stops, so that
the module runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import BackwardHook


class GradientHookError(Exception):
    """A forward that is being traced does something to gradients that is no operation."""


@contextmanager
def gradient_hooks() -> Iterator[None]:
    """Stop at hooks on gradients and at derivatives inside the block."""
    replaced: list[tuple[Any, str, str]] = [
        (Tensor, "register_hook", "a tensor's hook on its gradient"),
        (BackwardHook, "setup_input_hook", "a module's backward hook"),
        (torch.autograd, "grad", "a derivative taken in a forward"),
        (torch.autograd, "backward", "a backward inside a forward"),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for (owner, name, what), plain in zip(replaced, before, strict=True):
        setattr(owner, name, _stopping(plain, what))
    try:
        yield
    finally:
        for (owner, name, _), plain in zip(replaced, before, strict=True):
            setattr(owner, name, plain)


def _stopping(plain: Any, what: str) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):  # not in a trial run
            raise GradientHookError(f"{what} is no operation of a graph")
        return plain(*args, **kwargs)

    return called
