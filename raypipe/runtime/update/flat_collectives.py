"""Collectives on flat tensors, by the names that the installed torch has for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both, and warns about the old names; torch 2.9 has only those.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to fill ``whole`` with the members' shards in rank order."""
    work: dist.Work = _GATHER(whole, shard, group=group, async_op=True)
    return work


def start_reduce_scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum ``whole`` over the members; each gets its own shard of the sum."""
    work: dist.Work = _SCATTER(shard, whole, group=group, async_op=True)
    return work
