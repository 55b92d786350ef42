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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from raypipe.compat.torch_private import TorchDispatchMode
from raypipe.errors import CaptureError

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_DRAWN = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
"""What draws start values into a tensor; of one without memory, torch works out shapes for a millisecond."""
patching = threading.RLock()
"""Held while something of torch is replaced, which affects the whole process."""


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
        return _shaped(build_on_meta(build)[0])
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


def build_on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module, MadeParameters]:
    """Run a constructor with parameters on the meta device; it fails if it needs their values (``needs_values``)."""
    with (
        registrations(frozenset()) as made,
        same_randomness(0),
        loading_nothing(),
        _MetaForUninitialised(),  # type: ignore[no-untyped-call]
    ):
        return build(), made


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
    """Creates uninitialised tensors on the meta device, into which nothing is drawn."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _UNINITIALISED:
            kwargs |= {"device": torch.device("meta"), "pin_memory": False}
        elif func in _DRAWN and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


class MadeParameters(NamedTuple):
    """The parameters that a constructor makes, in order."""

    parameters: list[nn.Parameter]
    copied_from: dict[int, int]
    """Per parameter that was made by copying another one, the number of that."""


@contextmanager
def registrations(wanted: frozenset[int] | None) -> Iterator[MadeParameters]:
    """Collect each parameter as it is registered or copied, and move all but the ``wanted`` to the meta device.

    None moves none. A parameter that is registered again, because it is tied, is left as it is.
    """
    made: list[nn.Parameter] = []
    copied_from: dict[int, int] = {}
    known: dict[int, int] = {}
    copy = nn.Parameter.__deepcopy__

    def moved(param: nn.Parameter) -> nn.Parameter:
        if wanted is None or len(made) in wanted or param.is_meta:
            return param
        return nn.Parameter(param.detach().to("meta"), param.requires_grad)

    def note(param: nn.Parameter) -> nn.Parameter:
        known[id(param)] = len(made)
        made.append(param)
        return param

    def registered(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        return param if id(param) in known else note(moved(param))

    def copying(param: nn.Parameter, memo: dict[int, Any]) -> Any:
        if id(param) not in memo:
            copied = memo[id(param)] = moved(copy(param, memo))  # type: ignore[no-untyped-call]
            if id(param) in known:
                copied_from[len(made)] = known[id(param)]
            note(copied)
        return memo[id(param)]

    with patching:
        hook = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
        nn.Parameter.__deepcopy__ = copying  # type: ignore[method-assign,assignment]
        try:
            yield MadeParameters(made, copied_from)
        finally:
            hook.remove()
            nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign]


@contextmanager
def stand_ins(module: nn.Module, make: Callable[[Any], Any], buffers: bool = False) -> Iterator[None]:
    """Put what ``make`` returns in the place of each parameter (and buffer) inside the block; tied ones stay tied."""
    before: list[tuple[dict[str, Any], str, Any]] = [
        (held, name, value)
        for part in module.modules()
        for held in (part._parameters, *((part._buffers,) if buffers else ()))
        for name, value in held.items()
        if value is not None
    ]
    made: dict[int, Any] = {}
    try:
        for held, name, value in before:
            if id(value) not in made:
                made[id(value)] = make(value)
            held[name] = made[id(value)]
        yield
    finally:
        for held, name, value in before:
            held[name] = value


def tied_names(module: nn.Module, buffers: bool = False) -> list[tuple[str, ...]]:
    """Return all names of each parameter (and buffer), ordered by first names; a tied one has several."""
    names: dict[int, list[str]] = {}
    everything = [*module.named_parameters(remove_duplicate=False)]
    everything += [*module.named_buffers(remove_duplicate=False)] if buffers else []  # type: ignore[list-item]
    for name, value in everything:
        names.setdefault(id(value), []).append(name)
    return [tuple(group) for group in names.values()]
