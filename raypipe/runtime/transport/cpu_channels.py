"""Opens the CPU channels of a device: they carry CPU tensors, and what the GPU channels put on top of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.framed import gloo, ray_collective
from raypipe.runtime.transport.receive_buffers import Allocate
from raypipe.runtime.transport.same_host.receive import ShmReceiver
from raypipe.runtime.transport.same_host.send import ShmSender
from raypipe.runtime.transport.waiting import Progress

Edge = tuple[int, int]
Base = Literal["shm", "gloo", "ray"]
Ends = tuple[dict[int, Sender], dict[int, Receiver]]


def open_base(
    me: Peer,
    by_rank: Mapping[int, Peer],
    kinds: Mapping[Edge, Base],
    run_id: str,
    progress: Progress,
    allocate: Allocate,
    timeout_s: float,
    ring_bytes: int,
) -> Ends:
    """Outgoing channels by destination, incoming by source; ``kinds`` is the same, in the same order, everywhere.

    Raises TransportError when another device does not open its end in time.
    """
    out: dict[int, Sender] = {}
    into: dict[int, Receiver] = {}
    edges = {base: [edge for edge, kind in kinds.items() if kind == base] for base in ("shm", "gloo", "ray")}
    # The two groups are joined by every device of the run, also by those without such an edge.
    if edges["gloo"]:
        group = gloo.open_group(dist.get_world_size())
        for dst in _to(edges["gloo"], me):
            out[dst] = gloo.gloo_sender(by_rank[dst], group)
        for src in _from(edges["gloo"], me):
            into[src] = gloo.GlooReceiver(by_rank[src], group, progress, allocate)
    if edges["ray"]:
        name = ray_collective.open_gloo_group(dist.get_world_size(), me.rank, run_id)
        for dst in _to(edges["ray"], me):
            out[dst] = ray_collective.ray_sender(by_rank[dst], name)
        for src in _from(edges["ray"], me):
            into[src] = ray_collective.RayReceiver(by_rank[src], name, progress, allocate)
    # Three rounds, each of which only needs the other devices to have done the one before: no circle of waiting.
    readers = {src: ShmReceiver(me, by_rank[src], run_id, progress, allocate) for src in _from(edges["shm"], me)}
    writers = {dst: ShmSender(me, by_rank[dst], run_id, ring_bytes) for dst in _to(edges["shm"], me)}
    try:
        for writer in writers.values():
            writer.connect(timeout_s)
        for reader in readers.values():
            reader.accept(timeout_s)
    except TransportError:
        opened: list[ShmSender | ShmReceiver] = [*writers.values(), *readers.values()]
        for end in opened:
            end.close()
        raise
    return out | writers, into | readers


def _to(edges: Sequence[Edge], me: Peer) -> list[int]:
    return [dst for src, dst in edges if src == me.rank]


def _from(edges: Sequence[Edge], me: Peer) -> list[int]:
    return [src for src, dst in edges if dst == me.rank]
