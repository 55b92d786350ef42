"""The transports by name, and the choice of one for an edge. All devices choose alike, from where its two ends are.

To add one, write its ``Transport`` in a file of its own, and name it here and in ``parallel.transport`` of the job.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from raypipe.errors import SpecError, nearest
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.framed.gloo import Gloo
from raypipe.runtime.transport.framed.ray_collective import RayCollective
from raypipe.runtime.transport.gpu.nccl import Nccl
from raypipe.runtime.transport.gpu.pinned import Pinned
from raypipe.runtime.transport.inbox import who
from raypipe.runtime.transport.same_host.shm import SharedMemory
from raypipe.runtime.transport.transport import Transport

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
