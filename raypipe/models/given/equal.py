"""Show that a model instance is the one that its class makes of its configuration, or say where it differs."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.compat.transformers_private import attention_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps hooks that run with its forward or its backward."""
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules", "training"})
"""Compared for themselves."""
_NO_MATTER = frozenset(
    {"_weight_conversions", "hf_device_map", "_is_hf_initialized", "name_or_path", "_name_or_path"}
    | {"generation_config", "warnings_issued", "_is_full_backward_hook", "_forward_hooks_with_kwargs"}
    | {"_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks"}
    | {"_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    | {"_non_persistent_buffers_set", "gradient_checkpointing", "_gradient_checkpointing_func"}
)
"""Attributes of modules that no forward's result follows from."""
_CONFIGS_OWN = frozenset(
    {"use_cache", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
    | {"name_or_path", "architectures", "_commit_hash", "output_attentions"}
    | {"output_hidden_states", "return_dict", "_output_attentions"}
    | {"_experts_implementation_internal", "_experts_implementation", "decoder_start_token_id"}
)
"""Keys of configurations that say nothing of what a training forward computes."""
_LIBRARIES = ("torch", "transformers", "peft")
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
        if (found := _of_module(part, others[path], model.training)) is not None:
            return f"module {path}: {found}" if path else found
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
            if (found := _of_tensor(name, value, made[name])) is not None:
                return found
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
            if not {home, *_LIBRARIES} & set(Path(file).parts):
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
