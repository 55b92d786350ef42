"""Make modules whose parameters have no values yet.

``torch.device("meta")`` alone would do it. But a module draws its start values there too, and on that device torch
draws them, and ``to_empty`` allocates, by Python code that imports its compiler: 2 s of processor time in every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _NoStartValues(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


@contextmanager
def unset_parameters() -> Iterator[None]:
    """Modules that are made in this block have parameters on the meta device, and draw no values."""
    with torch.device("meta"), _NoStartValues():
        yield


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Give a module's parameters and buffers memory on a device, without values.

    Args:
        module: its tensors are on the meta device.
        dtype: of its floating-point tensors; others keep their own.
        device: where to.
    """

    def empty(t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=dtype if t.is_floating_point() else t.dtype, device=device)

    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, nn.Parameter(empty(parameter), parameter.requires_grad))
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, empty(buffer))
