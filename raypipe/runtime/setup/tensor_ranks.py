"""Map devices to tensor-parallel ranks: the processes of one device, each with a share of the same layers.

Schedules, programs and messages name devices. Tensor rank t of device d is the process of rank ``d * size + t``, so
that the ranks of a device, which communicate most, are neighbours. Between devices, only processes of the same tensor
rank communicate: every channel and every gradient all-reduce exists once per tensor rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

TENSOR_GROUP = "tensor"
"""Key, in what ``own_groups`` returns, of the group of one device's tensor-parallel ranks."""


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
    found = {
        f"{name}, tensor rank {m}": tuple(rank_of(d, m, size) for d in ranks)
        for name, ranks in groups.items()
        for m in range(size)
    }
    for device in range(devices):
        found[f"{TENSOR_GROUP} {device}"] = tuple(rank_of(device, m, size) for m in range(size))
    return found


def own_groups(groups: Mapping[str, T], device: int, tensor_rank: int, size: int) -> dict[str, T]:
    """Select a process's own groups by their device-level names, and add its tensor-parallel group."""
    if size == 1:
        return dict(groups)
    suffix = f", tensor rank {tensor_rank}"
    found = {name.removesuffix(suffix): group for name, group in groups.items() if name.endswith(suffix)}
    return {**found, TENSOR_GROUP: groups[f"{TENSOR_GROUP} {device}"]}


def own_channels(channels: Mapping[int, T], size: int) -> dict[int, T]:
    """Index a process's channels by the device, instead of the rank, at the other end."""
    return {tensor_rank_of(rank, size)[0]: channel for rank, channel in channels.items()}
