"""Models as lists of layers, and the tasks that they are trained for."""

from raypipe.models.build import DTYPES, build_model
from raypipe.models.divided_head import DividedHead
from raypipe.models.gpt import GptLayers, join_tied
from raypipe.models.keyed_random import KeyedDropout, random_keys
from raypipe.models.layered import (
    BodyEnds,
    Chain,
    CutTensor,
    LayeredModel,
    StageBody,
    TiedGroup,
    split_encoder,
    split_layers,
)
from raypipe.models.task import Field, Inputs, Lengths, Task, cross_entropy

__all__ = [
    "DTYPES",
    "BodyEnds",
    "Chain",
    "CutTensor",
    "DividedHead",
    "Field",
    "GptLayers",
    "Inputs",
    "KeyedDropout",
    "LayeredModel",
    "Lengths",
    "StageBody",
    "Task",
    "TiedGroup",
    "build_model",
    "cross_entropy",
    "join_tied",
    "random_keys",
    "split_encoder",
    "split_layers",
]
