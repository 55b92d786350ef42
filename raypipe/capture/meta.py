"""Build a module with parameters on the meta device and buffers with real values.

Parameters make models large, and their start values are drawn elsewhere, by key. Buffers (rotary frequencies, position
ids, running statistics) are small, and only the constructor knows their values.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_patching = threading.RLock()


def build_without_memory(build: Callable[[], nn.Module]) -> nn.Module:
    """Run a constructor so that its parameters are on the meta device, whatever device it asks for.

    Uninitialised tensors, which parameters usually begin as, are created on the meta device. Other tensors are moved
    there when they are registered as parameters, so at most one parameter is allocated at a time. If the constructor
    computes something from parameters that needs their values, it runs with memory, and the parameters are moved
    afterwards. The state of torch's global random generator is restored.
    """
    try:
        return build_on_meta(build)
    except Exception as error:  # also one that a source of models has made of torch's
        if not needs_values(error):
            raise
    with torch.random.fork_rng(devices=[]):
        module = build()
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                part._parameters[name] = moved.setdefault(id(parameter), on_meta)
    return module


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Run a constructor with parameters on the meta device; it fails if it needs their values (``needs_values``)."""
    with (
        _patching,
        torch.random.fork_rng(devices=[]),
        loading_nothing(),
        _meta_parameters(),
        _MetaForUninitialised(),  # type: ignore[no-untyped-call]
    ):
        return build()


@contextmanager
def loading_nothing() -> Iterator[None]:
    """Silence torch's warnings that a state dict which a constructor loads has no effect on meta tensors.

    The filters of warnings are the process's: callers hold a lock.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter in the checkpoint to a meta")
        yield


def needs_values(error: BaseException) -> bool:
    """Return whether a constructor failed because a parameter was on the meta device."""
    return "meta" in str(error) and "tensor" in str(error).lower()


class _MetaForUninitialised(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates uninitialised tensors on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs |= {"device": torch.device("meta"), "pin_memory": False}
        return func(*args, **kwargs)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return all names of each parameter of a module, ordered by first names; a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(_identity(parameter), []).append(name)
    return [tuple(group) for group in names.values()]


def _identity(parameter: Tensor) -> int:
    return id(parameter)
