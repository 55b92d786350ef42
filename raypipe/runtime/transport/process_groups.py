"""Make process groups so that independent ones are made at the same time.

In torch 2.13 ``new_group`` has no barrier: a process that is no member only counts the group's name and returns, in
microseconds, and a member waits for the other members. So the order alone decides how long it takes: along a line of
ranks 0-1, 1-2, 2-3, ... each pair would wait for the one before. In rounds of groups that share no rank, the time
grows with the number of groups of one rank, not with the number of all.

``use_local_synchronization`` is not used: it names a group by its ranks and the number of groups that the calling
process already has, so members that are in different numbers of groups wait for two different names, for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from raypipe.errors import TransportError

LAZY = "TORCH_GLOO_LAZY_INIT"
FOREVER = timedelta(days=365)
"""For operations that the host has its own deadline for: those on NCCL's groups, and messages that are posted ahead."""
_nccl_groups: list[dist.ProcessGroup] = []
"""Those that this process is in."""


def in_rounds(groups: Sequence[Collection[int]]) -> list[list[int]]:
    """Divide groups into rounds in which each rank is in one group at most; return the groups' indices by round.

    Larger groups come first, and each group joins the first round that is free for all of its ranks. If every rank is
    in at most d groups, a group of k ranks is in one of the first ``k * (d - 1) + 1`` rounds.

    >>> in_rounds([(0, 1), (1, 2), (2, 3)])
    [[0, 2], [1]]
    """
    rounds: list[list[int]] = []
    taken: dict[int, set[int]] = {}
    for index in sorted(range(len(groups)), key=lambda i: -len(groups[i])):
        busy = set[int]().union(*(taken.setdefault(rank, set()) for rank in groups[index]))
        turn = next(number for number in range(len(rounds) + 1) if number not in busy)
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(index)
        for rank in groups[index]:
            taken[rank].add(turn)
    return rounds


def new_group(
    ranks: Iterable[int], backend: str, timeout: timedelta | None = None, ctas: int | None = None
) -> dist.ProcessGroup | None:
    """Make a process group; every rank of the world calls this for all groups in the same order.

    NCCL's has no timeout: torch counts from when an operation is queued, long before the GPU comes to it, and its
    watchdog then ends the process. The host has the timeouts that name what they waited for.

    Args:
        ranks: of the members.
        backend: ``gloo`` or ``nccl``.
        timeout: of Gloo's operations.
        ctas: with NCCL, on how many multiprocessors a transfer runs at most; None for NCCL's own choice. What the
            environment says (``NCCL_MAX_CTAS``) goes before.

    Returns:
        The group, or None if the calling process is no member.
    """
    options = None
    if backend == "nccl":
        timeout = FOREVER
    if backend == "nccl" and ctas is not None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        options.config.max_ctas = ctas
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
    if not isinstance(group, dist.ProcessGroup):
        return None
    if backend == "nccl":
        _nccl_groups.append(group)
    return group


def abort_groups() -> None:
    """End what this process's NCCL groups have under way, and the groups; to destroy them would wait for lost peers.

    All at the same time: aborting one waits for what is before its work on the GPU's streams, and that may wait for a
    lost peer in another (pytorch/pytorch issue 119797). NCCL's groups of calls would not do: torch aborts in threads of
    its own.
    """
    threads = [threading.Thread(target=group.abort, daemon=True) for group in _nccl_groups]
    _nccl_groups.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget_groups() -> None:
    """Note that all groups are destroyed."""
    _nccl_groups.clear()


@contextmanager
def connected_on_use(lazily: bool = True) -> Iterator[None]:
    """Have Gloo's groups that are made in this context connect two ranks when they first use one another.

    Otherwise Gloo connects every pair when the group is made: 8,128 pairs for 128 ranks, of which an exchange of lists
    uses 832. A setting of the user's (``TORCH_GLOO_LAZY_INIT``) is left as it is. torch reads it for each group.
    """
    if not lazily or LAZY in os.environ:
        yield
        return
    os.environ[LAZY] = "1"
    try:
        yield
    finally:
        del os.environ[LAZY]


def connected(edges: Iterable[Collection[int]]) -> list[tuple[int, ...]]:
    """Return the sets of ranks that edges connect, directly or through others, each sorted.

    >>> connected([(0, 1), (4, 5), (2, 1)])
    [(0, 1, 2), (4, 5)]
    """
    member_of: dict[int, set[int]] = {}
    for edge in edges:
        joined = set(edge).union(*(member_of.get(rank, set()) for rank in edge))
        for rank in joined:
            member_of[rank] = joined
    return sorted({tuple(sorted(ranks)) for ranks in member_of.values()})


# Process groups for gradients. All are made at the start, in the same order on every device, in rounds.


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
