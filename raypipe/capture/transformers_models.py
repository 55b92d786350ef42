"""Configurations of models of the transformers library.

A model is named by its type (``gpt2``), which gets the library's default configuration with the given changes, or by a
local directory with a ``config.json``. Nothing is downloaded.
"""

from __future__ import annotations

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
    known = {key for key in config.to_dict() if not key.startswith("_")} | set(config.attribute_map)
    known |= {"num_labels"} if hasattr(config, "id2label") else set()  # kept as a table of names
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
