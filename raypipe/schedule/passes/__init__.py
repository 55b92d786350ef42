"""Passes are functions ``Schedule -> Schedule`` that keep a valid schedule valid."""

from raypipe.schedule.passes.backward import (
    add_recompute,
    closed_up,
    fuse_backward,
    insert_weights,
    keep_activations,
    split_backward,
    without_frozen,
)
from raypipe.schedule.passes.experts import divide_experts
from raypipe.schedule.passes.shard import forwards_alone, shard
from raypipe.schedule.passes.sync import add_updates, place_gradient_sync, replicate

__all__ = [
    "add_recompute",
    "add_updates",
    "closed_up",
    "divide_experts",
    "forwards_alone",
    "fuse_backward",
    "insert_weights",
    "keep_activations",
    "place_gradient_sync",
    "replicate",
    "shard",
    "split_backward",
    "without_frozen",
]
