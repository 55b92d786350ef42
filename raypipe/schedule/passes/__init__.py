"""Passes are functions ``Schedule -> Schedule`` that keep a valid schedule valid."""

from raypipe.schedule.passes.backward import fuse_backward, insert_weights, split_backward, without_frozen
from raypipe.schedule.passes.closed_up import closed_up
from raypipe.schedule.passes.recompute import add_recompute, keep_activations
from raypipe.schedule.passes.shard import forwards_alone, shard
from raypipe.schedule.passes.sync import add_updates, place_gradient_sync, replicate

__all__ = [
    "add_recompute",
    "add_updates",
    "closed_up",
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
