"""Models of the transformers library, from their configuration: class, constructor and example inputs.

Nothing is fetched: a model is named by its type (``gpt2``) and gets its library's default configuration with the given
changes, or by a local directory with a ``config.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.errors import SpecError, nearest
from raypipe.files import short

HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)
"""Which head a model type is given: that of the first of these tables that knows it."""
ENCODERS = {"bert", "roberta"}
"""Types that the first table knows too, though they are trained with masked tokens."""


def configuration(model: str, changes: Mapping[str, Any] | None = None) -> Any:
    """The configuration of a model type or of a local directory, with changes, and without a cache of past keys.

    Raises:
        SpecError: a type, or a key of its configuration, that the library does not know.
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
    for key in changes or {}:
        if key not in known:
            raise SpecError(f"model.config.{key}", f"{model} has no such key", nearest(key, known))
    if changes:
        config = _made(partial(make, **changes), model, "model.config")
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # what published checkpoints of these types say
    return config


def _made(make: Callable[[], Any], model: str, where: str = "model.hf") -> Any:
    try:
        return make()
    except Exception as error:  # the library's own, and pydantic-like ones of its dependencies
        if not (Path(model) / "config.json").is_file() and Path(model).is_dir():
            run = (Path(model) / "checkpoints").is_dir()
            fix = f"export it: raypipe export {model} -o DIR, and give DIR" if run else "give a directory that has one"
            what = "is a run of raypipe, and no model" if run else "holds no model"
            raise SpecError(where, f"{model} {what} that transformers reads: it has no config.json", fix) from None
        first = " ".join(str(error).split()) or type(error).__name__
        raise SpecError(where, f"{model}: {short(first, 300)}", "correct the configuration") from None


def builder(config: Any, attention: str = "sdpa") -> Callable[[], nn.Module]:
    """What constructs the model of a configuration with random weights.

    ``attention`` is the library's implementation: ``sdpa`` or ``eager``.

    Raises:
        SpecError: a type without a head that it can be trained with.
    """
    config._attn_implementation = attention
    kind = model_class(config)

    def build() -> nn.Module:
        model: nn.Module = kind(config)
        return model.train()

    return build


def model_class(config: Any) -> Any:
    """The class of the model with its usual training head: the directory's own, or the type's."""
    import transformers
    from transformers.models.auto import modeling_auto

    named = (config.architectures or [None])[0]
    if named and hasattr(transformers, named):
        return getattr(transformers, named)
    tables = [t for t in HEADS if t != HEADS[0]] if config.model_type in ENCODERS else HEADS
    for table in tables:
        name = getattr(modeling_auto, table).get(config.model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise SpecError("model.hf", f"{config.model_type} has no head to train it with", "use a language or image model")


def example_inputs(config: Any, batch: int = 2, sequence: int = 16) -> dict[str, Tensor]:
    """The inputs such a model is trained with, on the meta device: shapes and dtypes are all that capture needs."""
    main = getattr(model_class(config), "main_input_name", "input_ids")
    with torch.device("meta"):
        if main == "pixel_values":
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            return {"pixel_values": torch.empty(batch, config.num_channels, size, size)}
        tokens = {name: torch.empty(batch, sequence, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        if config.is_encoder_decoder:
            tokens["decoder_input_ids"] = torch.empty(batch, sequence + 1, dtype=torch.int64)
        return tokens
