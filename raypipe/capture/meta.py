"""Build a module with parameters on the meta device and buffers with real values.

Parameters make models large, and their start values are drawn elsewhere, by key. Buffers (rotary frequencies, position
ids, running statistics) are small, and only the constructor knows their values.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.errors import CaptureError

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
    afterwards. What a constructor draws for its buffers is the same in every process (``same_randomness``).

    Raises:
        CaptureError: a parameter has no shape before the first forward.
    """
    try:
        return _shaped(build_on_meta(build))
    except Exception as error:  # also one that a source of models has made of torch's
        if not needs_values(error):
            raise
    with same_randomness(0):
        module = _shaped(build())
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                part._parameters[name] = moved.setdefault(id(parameter), on_meta)
    return module


def _shaped(module: nn.Module) -> nn.Module:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            why = f"{kind} gives it a shape in its first forward only, and a model is cut before that"
            raise CaptureError(name, why, "use the class that is told its input's size, such as nn.Linear")
    return module


@contextmanager
def same_randomness(seed: int) -> Iterator[None]:
    """Begin the random generators of torch, numpy and Python at a seed inside the block, and restore them after it.

    Every process constructs a model for itself, and they must agree on it.
    """
    numpy_before, python_before = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_before)
            random.setstate(python_before)


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Run a constructor with parameters on the meta device; it fails if it needs their values (``needs_values``)."""
    with (
        _patching,
        same_randomness(0),
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
