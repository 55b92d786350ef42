"""From a job's model to its layers."""

from __future__ import annotations

from raypipe.job import ModelSpec
from raypipe.models.gpt_layers import GptLayers
from raypipe.models.layered import LayeredModel


def build_layers(model: ModelSpec) -> LayeredModel:
    """The layers of a job's model."""
    return GptLayers(model)
