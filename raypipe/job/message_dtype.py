"""The dtype in which floating-point tensors go from device to device."""

from __future__ import annotations

from raypipe.job.field_types import WIDTH, WireDtype
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.train_spec import TrainSpec


def message_dtype(train: TrainSpec, parallel: ParallelSpec) -> WireDtype | None:
    """Return what messages are cast to; None if they are sent as the stages make them.

    Under bfloat16 autocast the stages exchange a float32 residual stream, of which each matrix product reads bfloat16
    anyway; so bfloat16 is the default there, as in other pipelines, at half the bytes.
    """
    if parallel.wire_dtype is None:
        return "bfloat16" if train.dtype == "bfloat16" else None
    return parallel.wire_dtype if WIDTH[parallel.wire_dtype] < WIDTH[train.crossing_dtype] else None
