"""Layers divided over a group of processes: their matrices (tensor parallelism) or their experts."""

from raypipe.tensor.divide import Division, Shard, divide, divide_module, in_order
from raypipe.tensor.experts import is_experts
from raypipe.tensor.group import Axis, ProcessGroup, SoloGroup, TensorGroup, current_group, group_of_thread, set_group
from raypipe.tensor.table import FeatureTable, load_table, table_for

__all__ = [
    "Axis",
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
    "in_order",
    "is_experts",
    "load_table",
    "set_group",
    "table_for",
]
