"""Which kind of channel serves an edge: decided from where its two ends live, the same on every device."""

from __future__ import annotations

from typing import Literal, get_args

from raypipe.errors import SpecError, nearest
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.inbox import who

Kind = Literal["shm", "gloo", "nccl", "pinned", "ray-collective"]
Requested = Literal["auto", "shm", "gloo", "nccl", "pinned", "ray-collective"]


def choose(src: Peer, dst: Peer, requested: str = "auto", *, nccl: bool = True) -> Kind:
    """The channel for messages from ``src`` to ``dst``.

    ``nccl`` says whether NCCL can be used at all (a build of torch with it).

    ``auto`` takes shared memory between CPU devices of one host and Gloo between hosts; NCCL between different GPUs;
    and pinned host memory where NCCL can't serve the edge: two stages on one GPU, or a GPU and a CPU device.

    Raises:
        SpecError: the requested transport is unknown or can't serve this edge.
    """
    known = get_args(Requested)
    if requested not in known:
        raise SpecError("parallel.transport", f'there is no transport "{requested}"', nearest(requested, known))
    gpus = (src.device != "cpu") + (dst.device != "cpu")
    distinct_gpus = gpus == 2 and src.device != dst.device
    if requested == "auto":
        if gpus:
            return "nccl" if distinct_gpus and nccl else "pinned"
        return base_kind(src, dst)
    refusal = {
        "shm": _first(
            (gpus > 0, "shared memory carries CPU tensors, and a GPU is involved"),
            (src.node != dst.node, "the two devices are on different nodes"),
        ),
        "gloo": _first((gpus > 0, "Gloo carries CPU tensors, and a GPU is involved")),
        "nccl": _first(
            (gpus < 2, "NCCL needs a GPU at both ends"),
            (not distinct_gpus, "NCCL can't connect two stages on one GPU"),
            (not nccl, "this build of torch has no NCCL"),
        ),
        "pinned": _first((gpus == 0, "pinned memory serves GPUs, and there is none at either end")),
        "ray-collective": _first(
            (gpus == 1, "its groups can't join a GPU and a CPU device"),
            (gpus == 2 and not distinct_gpus, "its groups use NCCL, which can't connect two stages on one GPU"),
        ),
    }[requested]
    if refusal:
        raise SpecError(
            "parallel.transport",
            f"{requested} can't serve the edge from {who(src)} to {who(dst)}: {refusal}",
            f"use transport: auto, which takes {choose(src, dst, nccl=nccl)} here",
        )
    kind: Kind = next(k for k in get_args(Kind) if k == requested)
    return kind


def base_kind(src: Peer, dst: Peer) -> Literal["shm", "gloo"]:
    """How CPU tensors travel between the hosts of two devices, whatever the devices are."""
    return "shm" if src.node == dst.node else "gloo"


def _first(*checks: tuple[bool, str]) -> str:
    return next((why for holds, why in checks if holds), "")
