"""Checkpoints that any plan can read: workers write shards, and a manifest makes them a checkpoint.

A checkpoint is a directory ``step-00000050`` of safetensors files and one ``manifest.json``. Tensor names depend on the
model and not on the plan that wrote them: ``param/<layer>.<path>``, ``optim/<layer>.<path>/<state>``, and
``buffer/<path>`` for running statistics. A tensor that stages divide by rows is stored as their pieces, with the rows
behind its name (``[0:128]``), and read as one. The manifest is written last, so a directory without one is an
unfinished checkpoint. Nothing is pickled.
"""

from raypipe.checkpoint.read import (
    LOSS,
    Checkpoint,
    Storage,
    at_step,
    best,
    forget_best,
    keep_best,
    latest,
    open_checkpoint,
    outcome,
)
from raypipe.checkpoint.write import (
    ShardInfo,
    Snapshot,
    buffer_key,
    commit,
    rows_key,
    step_directory,
    write_shard,
    write_snapshot,
)

__all__ = [
    "LOSS",
    "Checkpoint",
    "ShardInfo",
    "Snapshot",
    "Storage",
    "at_step",
    "best",
    "buffer_key",
    "commit",
    "forget_best",
    "keep_best",
    "latest",
    "open_checkpoint",
    "outcome",
    "rows_key",
    "step_directory",
    "write_shard",
    "write_snapshot",
]
