"""Check a model instance: what of it no worker could do as the script does, and whether it is its class's own make."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from raypipe.capture.opaque import HOOKS
from raypipe.compat.transformers_private import attention_of
from raypipe.errors import SpecError

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
    result = inspect.getclosurevars(function)
    yield from result.nonlocals.items()
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
    result: dict[str, Any] = {}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            if name in _NO_MATTER:
                continue
            if isinstance(value, kinds):
                result[f"model.{path}.{name}".replace("..", ".")] = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                result[f"model.{path}.{name}".replace("..", ".")] = len(value)
    for kind in {owner for part in model.modules() for owner in type(part).__mro__}:
        if kind.__module__.partition(".")[0] in _LIBRARIES - {"__main__"} or kind is object:
            continue
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType):
                for name, value in _read(method):
                    if isinstance(value, list | dict | set):
                        result[f"{kind.__qualname__}.{method.__name__}, which reads {name}"] = len(value)
                    elif isinstance(value, kinds):
                        result[f"{kind.__qualname__}.{method.__name__}, which reads {name}"] = value
    return result


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


# Whether an instance is the one that its class makes of its configuration, so that workers can construct it.
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Compared for themselves."""
_NO_MATTER = frozenset(
    {"_weight_conversions", "hf_device_map", "_is_hf_initialized", "name_or_path", "_name_or_path"}
    | {"generation_config", "warnings_issued", "_is_full_backward_hook", "_forward_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"}
    | {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"_non_persistent_buffers_set", "gradient_checkpointing", "_gradient_checkpointing_func"}
    | {"_output_capturing_hooks_installed"}  # by transformers, when a forward is first asked for hidden states
)
"""Attributes of modules that no forward's result follows from."""
_CONFIGS_OWN = frozenset(
    {"use_cache", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
    | {"name_or_path", "architectures", "_commit_hash", "output_attentions"}
    | {"output_hidden_states", "return_dict", "_output_attentions"}
    | {"_experts_implementation_internal", "_experts_implementation", "decoder_start_token_id"}
)
"""Keys of configurations that say nothing of what a training forward computes."""
_OF_MODELS = ("torch", "transformers", "peft")
_PARAMETRIZE = "torch.nn.utils.parametrize"
_DEEPEST = 6


def difference(model: nn.Module, fresh: nn.Module) -> str | None:
    """Return where an instance differs from one that was just constructed; None where the two are the same.

    Values of parameters and of buffers that are saved with them are not compared, because they are read from a file;
    modes are, but for an instance that is in evaluation mode as a whole: the Trainer puts it in training mode.
    """
    parts, others = dict(model.named_modules()), dict(fresh.named_modules())
    for path in parts.keys() | others.keys():
        if path not in parts or path not in others:
            return f"module {path} is {'new' if path in parts else 'gone'}"
    for path, part in parts.items():
        if (result := _of_module(part, others[path], model.training)) is not None:
            return f"module {path}: {result}" if path else result
    return None


def _of_module(part: nn.Module, other: nn.Module, in_training: bool) -> str | None:
    if not _same_class(type(part), type(other)):
        return f"is a {type(part).__name__}, and its class makes a {type(other).__name__}"
    if (name := foreign_method(type(part))) is not None:
        return f"{name} has been replaced in its class"
    for hooks in HOOKS:
        if len(vars(part)[hooks]) != len(vars(other)[hooks]):
            return "has a hook"
    if in_training and not part.training:
        return "is in evaluation mode"
    for kind in ("_parameters", "_buffers"):
        own, made = vars(part)[kind], vars(other)[kind]
        if own.keys() != made.keys():
            return f"has other {kind[1:]}"
        for name, value in own.items():
            if (result := _of_tensor(name, value, made[name])) is not None:
                return result
            if kind == "_buffers" and name in part._non_persistent_buffers_set and not _same(value, made[name]):
                return f"its buffer {name} has other values"
    own, made = ({k: v for k, v in vars(one).items() if k not in _REGISTERED | _NO_MATTER} for one in (part, other))
    for name in own.keys() | made.keys():
        if name in HOOKS:
            continue
        if not own.get(name) and not made.get(name) and (name not in own or name not in made):
            continue  # switched off
        if name not in own or name not in made:
            return f"its attribute {name} is {'new' if name in own else 'gone'}"
        if not _same(own[name], made[name]):
            return f"its attribute {name} is another"
    return None


def _same_class(a: type, b: type) -> bool:
    """Return whether two classes are one; torch makes a class of its own for each parametrized module."""
    return a is b or (
        a.__name__ == b.__name__ and a.__module__ == b.__module__ == _PARAMETRIZE and a.__bases__ == b.__bases__
    )


def _of_tensor(name: str, value: Tensor | None, made: Tensor | None) -> str | None:
    if (value is None) != (made is None):
        return f"{name} is {'new' if made is None else 'gone'}"
    if value is None or made is None:
        return None
    if value.shape != made.shape:
        return f"{name} has shape {list(value.shape)}"
    if value.dtype != made.dtype:
        return f"{name} is {str(value.dtype).removeprefix('torch.')}"
    if value.requires_grad != made.requires_grad:
        return f"{name} is {'trained' if value.requires_grad else 'frozen'}"
    return "a gradient has a hook" if value._backward_hooks else None


def foreign_method(kind: type) -> str | None:
    """Return the name of a method that was put into a class from elsewhere after its module was imported, or None."""
    for owner in kind.__mro__:
        module = sys.modules.get(owner.__module__)
        home = owner.__module__.partition(".")[0]
        if module is None or owner in (object, nn.Module) or "parametrize" in owner.__module__:
            continue
        for name, value in vars(owner).items():
            method = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if not isinstance(method, types.FunctionType):
                continue
            file = inspect.unwrap(method).__code__.co_filename
            if file.startswith("<") or file == getattr(module, "__file__", None):  # the first: made by dataclasses
                continue
            if not {home, *_OF_MODELS} & set(Path(file).parts):
                return name
    return None


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether two values of attributes are shown to be equal."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > _DEEPEST:
        return False
    if isinstance(a, Tensor):
        return a.is_meta == b.is_meta and a.dtype == b.dtype and (a.is_meta or torch.equal(a.cpu(), b.cpu()))
    if isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device | range | Path):
        return bool(a == b) or (a != a and b != b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], depth + 1) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return bool(a == b)
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and type(a.__self__) is type(b.__self__)
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__ and _same(list(_cells(a)), list(_cells(b)), depth + 1)
    if isinstance(a, functools.partial):
        return _same([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], depth + 1)
    if hasattr(a, "to_dict") and hasattr(a, "attribute_map"):  # a configuration of transformers
        return _same(_keys(a), _keys(b), depth + 1) and attention_of(a) == attention_of(b)
    if isinstance(a, nn.Module):  # one that is held without being registered
        return _of_module(a, b, a.training) is None
    if hasattr(a, "__dict__"):
        return _same(dict(vars(a)), dict(vars(b)), depth + 1)
    return False


def _keys(config: Any) -> dict[str, Any]:
    return {key: _without_own(value) for key, value in config.to_dict().items() if key not in _CONFIGS_OWN}


def _without_own(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_own(inner) for key, inner in value.items() if key not in _CONFIGS_OWN}
    return value


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
