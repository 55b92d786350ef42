"""Models as lists of layers, and their loss functions."""

from raypipe.models.keyed_random import KeyedDropout, random_keys
from raypipe.models.layers import LayerPlan, TiedGroup, build_layers, join_tied
from raypipe.models.loss import token_cross_entropy
from raypipe.models.split import split_layers

__all__ = [
    "KeyedDropout",
    "LayerPlan",
    "TiedGroup",
    "build_layers",
    "join_tied",
    "random_keys",
    "split_layers",
    "token_cross_entropy",
]
