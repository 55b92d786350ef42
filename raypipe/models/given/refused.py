"""Refuse what a model instance or a script's loss has that no worker could do as the script does."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from raypipe.errors import SpecError
from raypipe.models.given.equal import HOOKS

_CARRIED = (
    *(bool, int, float, complex, str, bytes, type(None), type, range),
    *(types.ModuleType, types.BuiltinFunctionType, types.BuiltinMethodType),
    *(torch.dtype, torch.device, torch.Size),
)
"""What a function may close over: it is the same at every call."""
_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "numpy", "raypipe"}) | sys.stdlib_module_names
HOOK_FIX = "do in a forward what the hook does, or remove it"
STATE_FIX = "pass what changes as a column of the data, or keep it in a buffer or a number of the module"


def check_instance(model: nn.Module) -> None:
    """Check that all that happens in a model's forward can be captured.

    Raises:
        SpecError: it has a hook; a parameter without a value, of a kind of its own, or of a dtype that does not train;
            or a method of its own that reads or writes variables of the script.
    """
    inside = {id(part) for part in model.modules()}
    for path, part in model.named_modules():
        where = f"model.{path}" if path else "model"
        for hooks in HOOKS:
            for hook in vars(part)[hooks].values():
                if not _of_libraries(hook):
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    kind = "backward" if "backward" in hooks else "forward"
                    raise SpecError(where, f"has a {kind} hook, {name}, which no worker could call", HOOK_FIX)
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and _is_function(value):
                check_function(value, f"{where}.{name}", inside)
    for name, parameter in model.named_parameters():
        _check_parameter(f"model.{name}", parameter)


def _check_parameter(where: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, UninitializedParameter | UninitializedBuffer):
        raise SpecError(where, "has no shape before the first forward", "call the model once on a batch before")
    if parameter.is_meta:
        raise SpecError(where, "has no value: it is on the meta device", "load its weights, or construct it on the CPU")
    if type(parameter) is not nn.Parameter:
        why = f"is a {type(parameter).__name__}, which only its own library can train"
        raise SpecError(where, why, "give a model without quantised parameters")
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise SpecError(where, "has a hook on its gradient, which no worker could call", HOOK_FIX)


def _of_libraries(hook: Any) -> bool:
    """Return whether a hook belongs to a library, such as the one of ``torch.nn.utils.weight_norm``."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] in _LIBRARIES - {"__main__"}


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def check_function(function: Any, where: str, inside: set[int], free: frozenset[str] = frozenset()) -> None:
    """Check that a function's result follows from its arguments, and from what stays as it is while training.

    Args:
        function: a function, method or ``functools.partial`` of the script.
        where: what an error calls it.
        inside: identities of the model's modules, which it may use.
        free: names of arguments that others look after, such as ``self``.

    Raises:
        SpecError: it reads or writes variables of the script that may change, or trains a tensor that is no parameter.
    """
    seen: set[int] = set()
    todo: list[Any] = [function]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            todo += [one.func]
            for value in (*one.args, *one.keywords.values()):
                _check_value(value, "an argument that is bound to it", where, inside, todo)
            continue
        if isinstance(one, types.MethodType):
            if isinstance(one.__self__, nn.Module):
                _check_value(one.__self__, "its module", where, inside, todo)
            todo.append(one.__func__)
            continue
        if not isinstance(one, types.FunctionType) or _of_libraries(one):
            continue
        code = one.__code__
        for inner in _codes(code):
            for step in dis.get_instructions(inner):
                outer = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
                if outer or step.opname == "STORE_GLOBAL":
                    why = f"assigns to {step.argval}, a variable of the script, which no worker has"
                    raise SpecError(where, why, STATE_FIX)
        for name, value in _read(one):
            if name not in free:
                _check_value(value, name, where, inside, todo)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _read(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function closes over, and the global ones that it and its inner functions name."""
    found = inspect.getclosurevars(function)
    yield from found.nonlocals.items()
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in function.__globals__:
                yield step.argval, function.__globals__[step.argval]


def _check_value(value: Any, name: str, where: str, inside: set[int], todo: list[Any]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            why = f"reads {name}, a tensor that trains and is no parameter of the module that the function is called on"
            raise SpecError(where, why, "register it as a parameter of the model, and read it from there")
        return
    if isinstance(value, nn.Module):
        if id(value) not in inside and any(True for _ in value.parameters()):
            why = f"calls {name}, a {type(value).__name__} with parameters that are not the model's"
            raise SpecError(where, why, "make it a submodule of the model, so that it trains with it")
        return
    if isinstance(value, tuple):
        for item in value:
            _check_value(item, name, where, inside, todo)
        return
    if _is_function(value):
        todo.append(value)
        return
    if isinstance(value, _CARRIED) or type(value).__module__.partition(".")[0] in _LIBRARIES - {"builtins", "numpy"}:
        if isinstance(value, torch.Generator) or type(value).__module__ in ("random", "collections", "itertools"):
            raise SpecError(where, f"reads {name}, a {type(value).__name__} of the script, which changes", STATE_FIX)
        return
    if callable(value) and isinstance(value, types.BuiltinFunctionType | type):
        return
    why = f"reads {name}, a {type(value).__name__} of the script, which may change while training"
    raise SpecError(where, why, STATE_FIX)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules, and the variables of the script that methods of its classes read.

    They tell whether a forward changes one (``check_state``).
    """
    kinds = (bool, int, float, str)
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, kinds):
                found[f"model.{path}.{name}".replace("..", ".")] = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                found[f"model.{path}.{name}".replace("..", ".")] = len(value)
    for kind in {owner for part in model.modules() for owner in type(part).__mro__}:
        if kind.__module__.partition(".")[0] in _LIBRARIES - {"__main__"} or kind is object:
            continue
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                for name, value in _read(method):
                    if isinstance(value, list | dict | set):
                        found[f"{kind.__qualname__}.{method.__name__}, which reads {name}"] = len(value)
                    elif isinstance(value, kinds):
                        found[f"{kind.__qualname__}.{method.__name__}, which reads {name}"] = value
    return found


def check_state(before: dict[str, Any], model: nn.Module) -> None:
    """Check that no attribute has changed since ``state_of``.

    Raises:
        SpecError: one has.
    """
    after = state_of(model)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name) or (name in before) != (name in after):
            why = "changes in every forward, which the workers would not see"
            raise SpecError(name, why, "compute it from the forward's arguments, or leave it out")


def unchanged(draws: Callable[[], Any], before: Any) -> bool:
    """Return whether a generator of numbers outside torch is where it was."""
    return repr(draws()) == repr(before)
