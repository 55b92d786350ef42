"""Models of the transformers library for tests and benches: class and constructor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raypipe.errors import SpecError

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
