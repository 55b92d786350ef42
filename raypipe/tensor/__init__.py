"""Layers divided over a group of processes: their matrices (tensor parallelism) or their experts."""

from raypipe.tensor.divide import Division, divide, divide_module
from raypipe.tensor.experts import in_order, is_experts
from raypipe.tensor.group import (
    Axis,
    ProcessGroup,
    Shard,
    SoloGroup,
    TensorGroup,
    current_group,
    group_of_thread,
    set_group,
)
from raypipe.tensor.operators import gather_sequence, scatter_sequence
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
    "gather_sequence",
    "group_of_thread",
    "in_order",
    "is_experts",
    "load_table",
    "scatter_sequence",
    "set_group",
    "table_for",
]
