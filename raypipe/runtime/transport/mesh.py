"""Opens every channel of a device, in one order that is the same everywhere, so that nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.channel_kind import Kind, base_kind, choose
from raypipe.runtime.transport.cpu_channels import Base, Edge, Ends, open_base
from raypipe.runtime.transport.framed.ray_collective import RayLink
from raypipe.runtime.transport.gpu.nccl import Link, NcclReceiver, NcclSender, TorchLink, warm_up
from raypipe.runtime.transport.gpu.pinned import PinnedReceiver, PinnedSender
from raypipe.runtime.transport.gpu.side_stream import SideStream
from raypipe.runtime.transport.receive_buffers import empty, empty_pinned
from raypipe.runtime.transport.waiting import Progress


def open_channels(
    me: Peer,
    peers: Sequence[Peer],
    edges: Sequence[Edge],
    requested: str,
    run_id: str,
    *,
    timeout_s: float = 60.0,
    ring_bytes: int = 1 << 20,
) -> tuple[dict[int, Sender], dict[int, Receiver]]:
    """Outgoing channels by destination rank and incoming ones by source rank, ready for use.

    Every device calls this with the same arguments (but its own ``me``) after the world's process group exists; a GPU's
    actor has made its GPU the current device.

    Args:
        me: this device.
        peers: all devices of the run, in any order; their ranks are those of the world's process group.
        edges: directed (source rank, destination rank) pairs; order and repeats don't matter.
        requested: what the job asks for: auto, shm, gloo, nccl, pinned or ray-collective.
        run_id: names the run's files on this host and its groups; fresh for every start of the actors.
        timeout_s: how long to wait for the other devices.
        ring_bytes: first capacity of each shared-memory ring; rings grow as needed.

    Raises:
        SpecError: the request can't serve one of the edges.
        TransportError: a device did not open its end in time, or an edge makes no sense.
    """
    by_rank = {peer.rank: peer for peer in peers}
    ordered = sorted(set(edges))
    for src, dst in ordered:
        if src == dst or src not in by_rank or dst not in by_rank:
            raise TransportError(
                f"edge {src} -> {dst}", "an edge joins two different devices of the run", "fix the plan"
            )
    if not ordered:
        return {}, {}
    nccl = _everyone_has_nccl(peers)
    kinds = {(src, dst): choose(by_rank[src], by_rank[dst], requested, nccl=nccl) for src, dst in ordered}
    bases = {edge: _base(kind, by_rank[edge[0]], by_rank[edge[1]]) for edge, kind in kinds.items()}
    progress = Progress()
    allocate = empty if me.device == "cpu" else empty_pinned
    ends = open_base(me, by_rank, bases, run_id, progress, allocate, timeout_s, ring_bytes)
    for edge, kind in kinds.items():
        _put_on_top(edge, kind, me, by_rank, run_id, ends)
    out, into = ends
    for sender in out.values():
        progress.add(sender)
    return dict(out), into


def _everyone_has_nccl(peers: Sequence[Peer]) -> bool:
    """One answer for all: a device that thought otherwise would skip a group that the others wait in."""
    if all(peer.device == "cpu" for peer in peers):
        return False
    answers: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(answers, dist.is_nccl_available())
    return all(answers)


def _base(kind: Kind, src: Peer, dst: Peer) -> Base:
    if kind == "ray-collective" and src.device == "cpu":
        return "ray"
    return kind if kind in ("shm", "gloo") else base_kind(src, dst)


def _put_on_top(edge: Edge, kind: Kind, me: Peer, by_rank: Mapping[int, Peer], run_id: str, ends: Ends) -> None:
    """Replace this device's end of the edge, a CPU channel, by one for GPU tensors where that is what it needs."""
    src, dst = edge
    out, into = ends
    if kind == "pinned":
        if me.rank == src and me.device != "cpu":
            out[dst] = PinnedSender(by_rank[dst], out[dst], SideStream(_gpu()))
        elif me.rank == dst and me.device != "cpu":
            into[src] = PinnedReceiver(into[src], SideStream(_gpu()))
        return
    if kind == "nccl":
        group = dist.new_group([src, dst], backend="nccl")  # every device of the world takes part in making a group
    elif kind != "ray-collective" or by_rank[src].device == "cpu":
        return
    if me.rank not in edge:
        return
    sends, device = me.rank == src, _gpu()
    peer = by_rank[dst if sends else src]
    side = SideStream(device)
    link: Link
    if kind == "nccl":
        link = TorchLink(peer.rank, group)
        warm_up(link, sends, device)
    else:
        link = ray = RayLink(f"raypipe-{run_id}-{src}-{dst}", sends, device)
        warm_up(link, sends, device)
        ray.adopt(side.stream)
    if sends:
        out[dst] = NcclSender(peer, link, out[dst], side)
    else:
        into[src] = NcclReceiver(peer, link, into[src], side)


def _gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
