"""Process groups for gradients. All are made at the start, in the same order on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from raypipe.errors import TransportError


def create_groups(
    wanted: Mapping[str, Sequence[int]], backend: str, timeout_s: float = 1800.0
) -> dict[str, dist.ProcessGroup]:
    """Make every wanted group and return those this rank belongs to, by name.

    Every rank of the world calls this with the same ``wanted`` (name -> global ranks; the order of the names doesn't
    matter) and ``backend`` ("gloo" or "nccl"). Groups that share their ranks are still separate, so that their
    collectives may overlap. With NCCL each group runs one tiny all-reduce, because its communicator would otherwise be
    made in the middle of the first step, when other devices may be waiting for this one.

    Args:
        timeout_s: how long a collective on these groups may wait for the other ranks.

    Raises:
        TransportError: a rank outside the world, a repeated or an empty group.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    mine: dict[str, dist.ProcessGroup] = {}
    for name in sorted(wanted):
        ranks = sorted(wanted[name])
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= world:
            raise TransportError(
                f"group {name}", f"ranks {list(wanted[name])} in a world of {world}", "name each rank of the world once"
            )
        group: dist.ProcessGroup | None = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
        if me in ranks:
            assert group is not None
            mine[name] = group
            if backend == "nccl":
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
                torch.cuda.synchronize()
    return mine
