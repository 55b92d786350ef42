"""Map devices to tensor-parallel ranks: the processes of one device, each with a share of the same layers.

Schedules, programs and messages name devices. Tensor rank t of device d is the process of rank ``d * size + t``, so
that the ranks of a device, which communicate most, are neighbours. Between devices, only processes of the same tensor
rank communicate: every channel and every gradient all-reduce exists once per tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

TENSOR_GROUP = "tensor"
"""Key, in what ``own_groups`` returns, of the group of one device's tensor-parallel ranks."""
EXPERT_GROUP = "experts"
"""Key, in what ``own_groups`` returns, of the group of devices that divide experts with this one."""


# Experts: consecutive data-parallel copies divide those of every stage.


def expert_ranks(replicas: int, copies: int, experts: int) -> tuple[int, ...]:
    """Return which share of the experts each replica holds, where ``experts`` consecutive copies divide them.

    >>> expert_ranks(replicas=8, copies=4, experts=2)  # two directions in each copy
    (0, 0, 1, 1, 0, 0, 1, 1)
    """
    return tuple(replica // (replicas // copies) % experts for replica in range(replicas))


def expert_groups(placement: Sequence[Sequence[int]], copies: int, experts: int) -> dict[str, tuple[int, ...]]:
    """Return the groups of devices that divide experts, by name; each holds one share of all stages in its place.

    >>> expert_groups([[0, 1], [2, 3]], copies=2, experts=2)
    {'experts 0, 2': (0, 2), 'experts 1, 3': (1, 3)}
    """
    if experts == 1:
        return {}
    of_copy = len(placement) // copies
    result: dict[str, tuple[int, ...]] = {}
    for first in range(0, len(placement), of_copy * experts):
        for replica in range(first, first + of_copy):
            members = [placement[replica + n * of_copy] for n in range(experts)]
            for devices in zip(*members, strict=True):
                result[f"{EXPERT_GROUP} {', '.join(map(str, devices))}"] = devices
    return result


def rank_of(device: int, tensor_rank: int, size: int) -> int:
    """Return the rank of a device's process, where devices have ``size`` tensor ranks."""
    return device * size + tensor_rank


def tensor_rank_of(rank: int, size: int) -> tuple[int, int]:
    """Return (device, tensor rank) of a process."""
    return divmod(rank, size)


def tensor_rank_edges(edges: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """Turn directed edges between devices into edges between processes."""
    return tuple((rank_of(a, m, size), rank_of(b, m, size)) for a, b in edges for m in range(size))


def tensor_rank_groups(groups: Mapping[str, tuple[int, ...]], devices: int, size: int) -> dict[str, tuple[int, ...]]:
    """Turn groups of devices into groups of processes, one per tensor rank, and add each device's tensor group."""
    if size == 1:
        return dict(groups)
    result = {
        f"{name}, tensor rank {m}": tuple(rank_of(d, m, size) for d in ranks)
        for name, ranks in groups.items()
        for m in range(size)
    }
    for device in range(devices):
        result[f"{TENSOR_GROUP} {device}"] = tuple(rank_of(device, m, size) for m in range(size))
    return result


def own_groups(groups: Mapping[str, T], device: int, tensor_rank: int, size: int) -> dict[str, T]:
    """Select a process's own groups by their device-level names, and those of its device and its experts by theirs."""
    result = dict(groups)
    if size > 1:
        suffix = f", tensor rank {tensor_rank}"
        result = {name.removesuffix(suffix): group for name, group in groups.items() if name.endswith(suffix)}
        result[TENSOR_GROUP] = groups[f"{TENSOR_GROUP} {device}"]
    return {EXPERT_GROUP if name.startswith(f"{EXPERT_GROUP} ") else name: group for name, group in result.items()}


def own_channels(channels: Mapping[int, T], size: int) -> dict[int, T]:
    """Index a process's channels by the device, instead of the rank, at the other end."""
    return {tensor_rank_of(rank, size)[0]: channel for rank, channel in channels.items()}
