"""Opens every channel of a device, in one order that is the same everywhere, so that nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.transport import gloo
from raypipe.runtime.transport.channel import Peer, Receiver, Sender
from raypipe.runtime.transport.choose import choose
from raypipe.runtime.transport.progress import Progress
from raypipe.runtime.transport.shm_receive import ShmReceiver
from raypipe.runtime.transport.shm_send import ShmSender

Edge = tuple[int, int]


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

    Every device calls this with the same arguments (but its own ``me``) after the world's process group exists.

    Args:
        me: this device.
        peers: all devices of the run, in any order.
        edges: directed (source rank, destination rank) pairs; order and repeats don't matter.
        requested: what the job asks for: auto, shm, gloo, nccl, pinned or ray-collective.
        run_id: names the run's files on this host; fresh for every start of the actors.
        timeout_s: how long to wait for the other devices.
        ring_bytes: first capacity of each shared-memory ring; rings grow as needed.

    Raises:
        SpecError: the request can't serve one of the edges.
        TransportError: a device did not open its end in time.
    """
    by_rank = {peer.rank: peer for peer in peers}
    ordered = sorted(set(edges))
    for src, dst in ordered:
        if src == dst or src not in by_rank or dst not in by_rank:
            raise TransportError(f"edge {src} -> {dst}", "needs two different devices of the run", "check the plan")
    kinds = {(src, dst): choose(by_rank[src], by_rank[dst], requested) for src, dst in ordered}
    progress = Progress()
    senders: dict[int, Sender] = {}
    receivers: dict[int, Receiver] = {}
    _open_gloo(me, by_rank, [edge for edge in ordered if kinds[edge] == "gloo"], progress, senders, receivers)
    _open_shm(
        me,
        by_rank,
        [edge for edge in ordered if kinds[edge] == "shm"],
        run_id,
        progress,
        timeout_s,
        ring_bytes,
        senders,
        receivers,
    )
    return senders, receivers


def _open_gloo(
    me: Peer,
    by_rank: dict[int, Peer],
    edges: list[Edge],
    progress: Progress,
    senders: dict[int, Sender],
    receivers: dict[int, Receiver],
) -> None:
    if not edges:
        return
    group = gloo.open_group(dist.get_world_size())  # by every device, also those without such an edge
    for src, dst in edges:
        if src == me.rank:
            sender = senders[dst] = gloo.GlooSender(by_rank[dst], group)
            progress.add(sender)
        elif dst == me.rank:
            receivers[src] = gloo.GlooReceiver(by_rank[src], group, progress)


def _open_shm(
    me: Peer,
    by_rank: dict[int, Peer],
    edges: list[Edge],
    run_id: str,
    progress: Progress,
    timeout_s: float,
    ring_bytes: int,
    senders: dict[int, Sender],
    receivers: dict[int, Receiver],
) -> None:
    # Three rounds, each of which only needs the other devices to have done the one before: no circle of waiting.
    incoming = {src: ShmReceiver(me, by_rank[src], run_id, progress) for src, dst in edges if dst == me.rank}
    outgoing = {dst: ShmSender(me, by_rank[dst], run_id, ring_bytes) for src, dst in edges if src == me.rank}
    for sender in outgoing.values():
        sender.connect(timeout_s)
        progress.add(sender)
    for receiver in incoming.values():
        receiver.accept(timeout_s)
    senders.update(outgoing)
    receivers.update(incoming)
