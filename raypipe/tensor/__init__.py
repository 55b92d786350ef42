"""Tensor parallelism: a layer's parameters divided over a group of devices that compute it together."""

from raypipe.tensor.divide import Division, Shard, divide, divide_module
from raypipe.tensor.group import ProcessGroup, SoloGroup, TensorGroup, current_group, group_of_thread, set_group
from raypipe.tensor.table import FeatureTable, load_table, table_for

__all__ = [
    "Division",
    "FeatureTable",
    "ProcessGroup",
    "Shard",
    "SoloGroup",
    "TensorGroup",
    "current_group",
    "divide",
    "divide_module",
    "group_of_thread",
    "load_table",
    "set_group",
    "table_for",
]
