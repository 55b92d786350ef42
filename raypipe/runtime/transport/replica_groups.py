"""Process groups for gradients. All are made at the start, in the same order on every device, in rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport.process_groups import in_rounds, new_group


def create_groups(
    wanted: Mapping[str, Sequence[int]], backend: str, timeout_s: float = 1800.0
) -> dict[str, dist.ProcessGroup]:
    """Make every wanted group and return those this rank belongs to, by name.

    Every rank of the world calls this with the same ``wanted`` (name -> global ranks; the order of the names doesn't
    matter) and ``backend`` ("gloo" or "nccl"). Groups that share their ranks are still separate, so that their
    collectives may overlap. With NCCL each group runs one tiny all-reduce, because its communicator would otherwise be
    made in the middle of the first step, when other devices may be waiting for this one. Groups without a common rank
    are made at the same time (``in_rounds``).

    Args:
        timeout_s: how long a collective on these groups may wait for the other ranks.

    Raises:
        TransportError: a rank outside the world, a repeated or an empty group.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    mine: dict[str, dist.ProcessGroup] = {}
    names = sorted(wanted)
    for name in names:
        ranks = sorted(wanted[name])
        if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= world:
            raise TransportError(
                f"group {name}", f"ranks {list(wanted[name])} in a world of {world}", "name each rank of the world once"
            )
    for index in chain(*in_rounds([wanted[name] for name in names])):
        ranks = sorted(wanted[names[index]])
        group = new_group(ranks, backend, timedelta(seconds=timeout_s))
        if me in ranks:
            assert group is not None
            mine[names[index]] = group
            if backend == "nccl":
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
                torch.cuda.synchronize()
    return mine
