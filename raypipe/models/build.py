"""From a job's model to its layers."""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.errors import SpecError
from raypipe.job import GptSpec, ModelSpec
from raypipe.models.gpt_layers import GptLayers
from raypipe.models.layered import LayeredModel
from raypipe.models.task import Field


def build_layers(model: ModelSpec, fields: Mapping[str, Field] | None = None) -> LayeredModel:
    """The layers of a job's model; ``fields`` are the raw inputs that the data's arrays give, None for text."""
    if isinstance(model, GptSpec):
        return GptLayers(model)
    raise SpecError("model", "captured models are not available yet", "use model: {type: gpt, ...}")
