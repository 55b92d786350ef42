"""Configurations of models of the transformers library.

A model is named by its type (``gpt2``), which gets the library's default configuration with the given changes, or by a
local directory with a ``config.json``. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from raypipe.errors import SpecError, nearest
from raypipe.files import short


def configuration(model: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Make the configuration of a model type or of a local directory, with changes, and with the KV cache off.

    Raises:
        SpecError: the library does not know the type, or a key of its configuration.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    make: Callable[..., Any]
    if Path(model).is_dir():
        make = partial(AutoConfig.from_pretrained, model, local_files_only=True)
    elif model in CONFIG_MAPPING_NAMES:
        make = partial(AutoConfig.for_model, model)
    else:
        why = f'"{model}" is neither a model type nor a local directory'
        raise SpecError("model.hf", why, nearest(model, CONFIG_MAPPING_NAMES))
    config = _made(make, model)
    known = _known(config, Path(model))
    for key in changes or {}:
        if key not in known:
            raise SpecError(f"model.config.{key}", f"{model} has no such key", nearest(key, known))
    if changes:
        config = _made(partial(make, **changes), model, "model.config")
    for part in (config, config.get_text_config()):  # a language model inside another has a switch of its own
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(
            config, "pad_token_id", None
        )  # as in the published checkpoints of these types
    return config


def _known(config: Any, directory: Path) -> set[str]:
    """Return the keys that a configuration may have.

    These are the declared ones, older names that are converted into these, those of the directory's own file, and those
    that the type's code reads though no class declares them, such as ``head_dim``. A configuration made of several is
    read in its parts, whose keys are not its own.
    """
    known = {*config.to_dict(), *config.attribute_map, *inspect.signature(type(config)).parameters}
    known |= {"num_labels"} if hasattr(config, "id2label") else set()  # kept as a table of names
    if (directory / "config.json").is_file():
        known |= set(saved_config(directory))
    known |= _keys_converted(config)
    if not config.sub_configs:
        for file in Path(inspect.getfile(type(config))).parent.glob("model*.py"):
            known |= _keys_read(file.read_text(encoding="utf-8"))
    kept = type(config).model_type, "self", "args", "kwargs"
    return {key for key in known if not key.startswith("_") and key not in kept and not _is_method(config, key)}


def saved_config(directory: Path) -> dict[str, Any]:
    """Return the content of a directory's ``config.json`` as transformers reads it: numbers may be infinite."""
    from transformers import PreTrainedConfig

    found: dict[str, Any] = PreTrainedConfig.get_config_dict(str(directory), local_files_only=True)[0]
    return found


def _is_method(config: Any, key: str) -> bool:
    return callable(getattr(type(config), key, None))


def _keys_converted(config: Any) -> set[str]:
    """Return the older names that the constructor takes, such as ``rope_theta``."""
    named = [vars(kind).get(name) for kind in type(config).__mro__ for name in ("__init__", "__post_init__")]
    found = {key for function in named for key in _keys_taken(function)}
    rope = _keys_taken(getattr(type(config), "convert_rope_params_to_dict", None))
    return found | rope if hasattr(config, "rope_parameters") else found - rope


def _keys_taken(function: Any) -> set[str]:
    """Return the names that a function takes out of its ``kwargs``."""
    if not inspect.isfunction(function) or not function.__module__.startswith("transformers."):
        return set()
    found = set()
    try:
        code = inspect.getsource(function)
    except OSError:  # made by a decorator
        return set()
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.add(name)
    return found


def _keys_read(code: str) -> set[str]:
    """Return the names that code reads from ``config``, ``self.config`` and the like.

    >>> sorted(_keys_read("getattr(config, 'head_dim', self.config.width)"))
    ['head_dim', 'width']
    """
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            match node.args:
                case [owner, ast.Constant(value=str(name)), *_] if _is_config(owner):
                    found.add(name)
    return found


def _is_config(node: ast.expr) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == "config"


def _made(make: Callable[[], Any], model: str, where: str = "model.hf") -> Any:
    try:
        return make()
    except Exception as error:  # the library and its dependencies raise many classes
        if not (Path(model) / "config.json").is_file() and Path(model).is_dir():
            run = (Path(model) / "checkpoints").is_dir()
            fix = f"export it: raypipe export {model} -o DIR, and give DIR" if run else "give a directory that has one"
            what = "is a run of raypipe and not a model" if run else "holds no model"
            raise SpecError(where, f"{model} {what} that transformers reads: it has no config.json", fix) from None
        first = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(where, f"{model}: {short(first, 300)}", "correct the configuration") from None
