"""The transports by name, and the choice of one for an edge. All devices choose alike, from where its two ends are.

To add one, write its ``Transport`` in a file of its own, and name it here and in ``parallel.transport`` of the job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from raypipe.errors import SpecError, TransportError, nearest
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.framed.gloo import Gloo
from raypipe.runtime.transport.framed.ray_collective import RayCollective
from raypipe.runtime.transport.gpu.nccl import Nccl
from raypipe.runtime.transport.gpu.pinned import Pinned
from raypipe.runtime.transport.inbox import absent, who
from raypipe.runtime.transport.same_host.shm import SharedMemory
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport

TRANSPORTS: dict[str, Transport] = {
    "shm": SharedMemory(),
    "gloo": Gloo(),
    "nccl": Nccl(),
    "pinned": Pinned(),
    "ray-collective": RayCollective(),
}
"""In order of preference: ``auto`` takes the first that can serve an edge, which is one of the first four."""


def choose(src: Peer, dst: Peer, requested: str = "auto", *, lacking: Collection[str] = ()) -> str:
    """Choose the transport for messages from ``src`` to ``dst``, by name.

    Args:
        requested: one of TRANSPORTS, or ``auto`` for the first that can serve the edge: shared memory between CPU
            devices of one host, Gloo between hosts, NCCL between different GPUs, and pinned host memory where NCCL
            can't: two stages on one GPU, or a GPU and a CPU device.
        lacking: transports that some device of the run can't use at all (``Peer.lacks``).

    Raises:
        SpecError: the requested transport is unknown or can't serve this edge.
    """
    if requested == "auto":
        return next(name for name in TRANSPORTS if not _refusal(name, src, dst, lacking))
    if requested not in TRANSPORTS:
        raise SpecError(
            "parallel.transport", f'there is no transport "{requested}"', nearest(requested, ("auto", *TRANSPORTS))
        )
    if why := _refusal(requested, src, dst, lacking):
        raise SpecError(
            "parallel.transport",
            f"{requested} can't serve the edge from {who(src)} to {who(dst)}: {why}",
            f"use transport: auto, which takes {choose(src, dst, lacking=lacking)} here",
        )
    return requested


def choose_for_cpu_tensors(src: Peer, dst: Peer) -> str:
    """Choose the transport for CPU tensors between the hosts of two devices, whatever the devices are."""
    return choose(replace(src, device="cpu"), replace(dst, device="cpu"))


def _refusal(name: str, src: Peer, dst: Peer, lacking: Collection[str]) -> str:
    transport = TRANSPORTS[name]
    missing = f"not every device of the run has {transport.needs}" if name in lacking else ""
    return transport.refusal(src, dst) or missing


# Opens all channels of a device. Every device opens them in the same order, so that none waits in a circle.


def open_channels(
    me: Peer,
    peers: Sequence[Peer],
    edges: Sequence[Edge],
    requested: str,
    run_id: str,
    *,
    timeout_s: float = 300.0,
) -> Ends:
    """Open the channels of a device: outgoing ones by destination rank, incoming ones by source rank.

    Every device calls this with the same arguments (but its own ``me``) after the world's process group exists; a GPU's
    actor has made its GPU the current device.

    Args:
        me: this device.
        peers: all devices of the run, in any order; their ranks are those of the world's process group.
        edges: directed (source rank, destination rank) pairs; order and repeats don't matter.
        requested: what the job asks for: auto, or one of TRANSPORTS.
        run_id: names the run's files on this host and its groups; fresh for every start of the actors.
        timeout_s: how long to wait for the other devices, here and in what the transports do themselves.

    Raises:
        SpecError: the request can't serve one of the edges.
        TransportError: a device did not open its end in time, or an edge makes no sense.
    """
    by_rank = {peer.rank: peer for peer in peers}
    opening, ends = Opening(me, by_rank, run_id, timeout_s), Ends({}, {})
    try:
        for transport, served in served_by(peers, edges, requested):
            transport.open(served, opening, ends)
    except RuntimeError as error:  # torch's, where a process group is made
        ends.close()
        raise absent(error) from error
    except BaseException:
        ends.close()
        raise
    for sender in ends.out.values():
        opening.progress.add(sender)
    return ends


def served_by(peers: Sequence[Peer], edges: Sequence[Edge], requested: str) -> list[tuple[Transport, list[Edge]]]:
    """Return which transport serves which edges, in the order in which they are opened; the same on every device.

    Raises:
        SpecError: the request can't serve one of the edges.
        TransportError: an edge makes no sense.
    """
    by_rank = {peer.rank: peer for peer in peers}
    ordered = sorted(set(edges))
    for src, dst in ordered:
        if src == dst or src not in by_rank or dst not in by_rank:
            raise TransportError(
                f"edge {src} -> {dst}", "an edge joins two different devices of the run", "fix the plan"
            )
    # One answer for all: a device that chose otherwise would skip a group that the others wait in.
    lacking = {name for peer in peers for name in peer.lacks}
    lowest: dict[Edge, str] = {}
    on_top: dict[Edge, str] = {}
    for edge in ordered:
        src_peer, dst_peer = by_rank[edge[0]], by_rank[edge[1]]
        lowest[edge] = choose(src_peer, dst_peer, requested, lacking=lacking)
        if TRANSPORTS[lowest[edge]].over_cpu_channel(src_peer, dst_peer):
            on_top[edge], lowest[edge] = lowest[edge], choose_for_cpu_tensors(src_peer, dst_peer)
    return [
        (transport, served)
        for layer in (lowest, on_top)
        for name, transport in TRANSPORTS.items()
        if (served := [edge for edge, kind in layer.items() if kind == name])
    ]
