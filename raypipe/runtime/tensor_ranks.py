"""A device of the schedule as a group of processes, its members, which hold a share each of the same layers.

Schedules, programs and messages know devices. Member m of device d is the process of rank ``d * size + m``, so that
the members of a group, who exchange most, are neighbours. Equal members of different devices talk to each other: every
channel and every gradient sum exists once per member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

TENSOR_GROUP = "tensor"
"""Name of the group of one device's members, as ``own_groups`` gives it."""


def rank_of(device: int, tensor_rank: int, size: int) -> int:
    """The process that is this member of a device."""
    return device * size + tensor_rank


def tensor_rank_of(rank: int, size: int) -> tuple[int, int]:
    """(device, member) of a process."""
    return divmod(rank, size)


def tensor_rank_edges(edges: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """Channels between processes, from those between devices."""
    return tuple((rank_of(a, m, size), rank_of(b, m, size)) for a, b in edges for m in range(size))


def tensor_rank_groups(groups: Mapping[str, tuple[int, ...]], devices: int, size: int) -> dict[str, tuple[int, ...]]:
    """Groups of processes, from groups of devices: one per member, and one of all members of each device."""
    if size == 1:
        return dict(groups)
    found = {f"{name}, member {m}": tuple(rank_of(d, m, size) for d in ranks)
             for name, ranks in groups.items() for m in range(size)}  # fmt: skip
    for device in range(devices):
        found[f"{TENSOR_GROUP} {device}"] = tuple(rank_of(device, m, size) for m in range(size))
    return found


def own_groups(groups: Mapping[str, T], device: int, tensor_rank: int, size: int) -> dict[str, T]:
    """A process's own groups under the names that devices know them by, and that of its device's members."""
    if size == 1:
        return dict(groups)
    suffix = f", member {tensor_rank}"
    found = {name.removesuffix(suffix): group for name, group in groups.items() if name.endswith(suffix)}
    return {**found, TENSOR_GROUP: groups[f"{TENSOR_GROUP} {device}"]}


def own_channels(channels: Mapping[int, T], size: int) -> dict[int, T]:
    """A process's channels by the device at their other end."""
    return {tensor_rank_of(rank, size)[0]: channel for rank, channel in channels.items()}
